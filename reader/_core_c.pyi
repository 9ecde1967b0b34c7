from collections.abc import Sequence

view_columns: tuple[str, ...]
input_columns: tuple[str, ...]

def merge(
    view: bytearray,
    inputs: bytearray,
    rows: memoryview,
    own: memoryview,
    boards: Sequence[memoryview],
    now_ns: int,
    last_ns: int,
    /,
) -> int: ...
def cold_set(view: bytearray, now_ns: int, own_rate: float, first: float, second: float, /) -> int: ...
