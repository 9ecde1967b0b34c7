"""Traces: what is read, and what each bad file is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadbox.cli.demo._trace import Request, TraceError, read_trace, scale


def test_the_built_in_trace_is_there_with_its_source() -> None:
    from importlib import resources

    trace = read_trace()
    assert len(trace) == 3000
    assert trace[0] == Request(0.0, 374, 44)
    assert trace == sorted(trace, key=lambda request: request.arrival_s)
    source = resources.files("loadbox.cli.demo").joinpath("traces", "SOURCE.md").read_text(encoding="utf-8")
    assert "CC BY 4.0" in source
    assert "https://github.com/Azure/AzurePublicDataset" in source


def test_columns_in_any_order_blank_lines_and_a_mark_in_front(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes("﻿who, output_tokens,arrival_s,prompt_tokens\r\na,3,10.5,7\r\n\r\nb,4,12,8\r\n".encode())
    assert read_trace(path) == [Request(0.0, 7, 3), Request(1.5, 8, 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no column arrival_s and no prompt_tokens and no output_tokens"),
        ("arrival_s,prompt_tokens\n1,2\n", "has no column output_tokens"),
        ("0.0,374,44\n", "has no column arrival_s"),
        ("arrival_s,prompt_tokens,output_tokens\n", "has no requests"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2\n", "line 2: 2 values where at least 3 are needed"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,3\nsoon,2,3\n", "line 3: arrival_s is 'soon'"),
        ("arrival_s,prompt_tokens,output_tokens\nnan,2,3\n", "line 2: arrival_s is 'nan'"),
        ("arrival_s,prompt_tokens,output_tokens\ninf,2,3\n", "line 2: arrival_s is 'inf'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2.5,3\n", "line 2: prompt_tokens is '2.5'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,2,0\n", "line 2: output_tokens is '0'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,-2,3\n", "line 2: prompt_tokens is '-2'"),
        ("arrival_s,prompt_tokens,output_tokens\n1,99999999999,3\n", "line 2: prompt_tokens is '99999999999'"),
        ("arrival_s,prompt_tokens,output_tokens\n2,1,1\n1,1,1\n", "line 3: arrival_s is 1 after 2: sort"),
        ('arrival_s,prompt_tokens,output_tokens\n1,2,"3\n', "line 2"),
    ],
)
def test_a_bad_trace_is_told_where_and_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_or_not_there(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"arrival_s\xff\xfe")
    with pytest.raises(TraceError, match="is not text in UTF-8"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv")


def test_scaling_brings_arrivals_closer_and_cuts() -> None:
    trace = [Request(float(second), 1, 1) for second in range(10)]
    assert [request.arrival_s for request in scale(trace, rate=2.0, seconds=2.0)] == [0.0, 0.5, 1.0, 1.5]
    assert len(scale(trace, rate=2.0, seconds=100.0, limit=3)) == 3
    assert len(scale(trace, rate=2.0, seconds=100.0)) == 10
