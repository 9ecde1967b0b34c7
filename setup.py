"""The C core: optional, so that a machine without a compiler gets the pure-Python twin; LOADBOX_REQUIRE_C=1 insists on it."""

import os

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "loadbox.mailbox._seqlock_c",
            [
                "mailbox/_seqlock_c.c",
                "mailbox/_core_owner.c",
                "mailbox/_core_writer.c",
                "mailbox/_core_slot.c",
                "mailbox/_core_watch.c",
                "mailbox/_core_reader.c",
                "mailbox/_core_group.c",
            ],
            depends=["mailbox/_core.h", "mailbox/loadbox.h"],
            include_dirs=["mailbox"],
            extra_compile_args=["-O2", "-std=c11", "-D_GNU_SOURCE", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            optional=os.environ.get("LOADBOX_REQUIRE_C", "") in ("", "0"),
        ),
        Extension(
            "loadbox.reader._core_c",
            ["reader/_core_c.c"],
            extra_compile_args=["-O2", "-std=c11", "-fvisibility=hidden"],
            optional=os.environ.get("LOADBOX_REQUIRE_C", "") in ("", "0"),
        ),
    ],
)
