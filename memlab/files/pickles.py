"""Plain values out of a pickle of a stranger's, without unpickling it.

A pickle is a program for a small machine. Ours knows those instructions alone that a memory snapshot needs: they make
numbers, text, lists, short tuples, and dictionaries with text for keys. There is none that could reach a class, a
function or a file, so nothing that a file says is run.

Rule 1. An unknown instruction ends the reading.
Rule 2. Work and memory are in proportion to the file, whose length is limited, as is the number of lists and
        dictionaries: memory is taken for what is there and not for what a length announces, a whole number has nine
        bytes at most, and nothing is hashed but text.
Rule 3. What comes back may share parts, or hold itself: whoever walks through it goes to a known depth.
"""

from __future__ import annotations

import struct
from typing import Any

from .checks import WrongError, shown

LONGEST = 2**28  # bytes
_MOST = 2**23  # lists, dicts and tuples, and what waits or is kept to be used again

BEGINNING = b"\x80"  # the first byte of every pickle since protocol 2


def plain_values(content: bytes) -> Any:
    """What the pickle holds. Raises WrongError for all that is no pickle of plain values."""
    try:
        return _run(content)
    except (IndexError, KeyError, struct.error):  # beyond the end, or a value that was never made
        raise WrongError("it is cut short or damaged") from None


def _run(content: bytes) -> Any:
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    containers = 0
    at = 0
    push = stack.append
    while True:
        code = content[at]
        at += 1
        # In the order of how often snapshots have them.
        if code == 0x68:  # BINGET
            push(memo[content[at]])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            push(memo[_number(content, at, 4)])
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x4B:  # BININT1
            push(content[at])
            at += 1
        elif code == 0x4D:  # BININT2
            push(_number(content, at, 2))
            at += 2
        elif code == 0x4A:  # BININT
            push(struct.unpack_from("<i", content, at)[0])
            at += 4
        elif code == 0x8A:  # LONG1
            size = content[at]
            if size > 9:
                raise WrongError(f"byte {at - 1:,} begins a number of {size} bytes")
            push(int.from_bytes(content[at + 1 : at + 1 + size], "little", signed=True))
            at += 1 + size
        elif code in b"}])":  # EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE
            containers += 1
            push({} if code == 0x7D else [] if code == 0x5D else ())
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x75:  # SETITEMS
            items = _since(stack, marks)
            _set(stack[-1], items[::2], items[1::2])
        elif code == 0x65:  # APPENDS
            items = _since(stack, marks)
            _list(stack[-1]).extend(items)
        elif code == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], [key], [value])
        elif code == 0x61:  # APPEND
            value = stack.pop()
            _list(stack[-1]).append(value)
        elif code in b"\x85\x86\x87":  # TUPLE1, TUPLE2, TUPLE3
            containers += 1
            size = code - 0x84
            if len(stack) < size:
                raise IndexError
            stack[-size:] = [tuple(stack[-size:])]
        elif code == 0x8C:  # SHORT_BINUNICODE
            push(_text(content, at + 1, content[at]))
            at += 1 + content[at]
        elif code == 0x58:  # BINUNICODE
            size = _number(content, at, 4)
            push(_text(content, at + 4, size))
            at += 4 + size
        elif code == 0x47:  # BINFLOAT
            push(struct.unpack_from(">d", content, at)[0])
            at += 8
        elif code in b"N\x88\x89":  # NONE, NEWTRUE, NEWFALSE
            push(None if code == 0x4E else code == 0x88)
        elif code == 0x71:  # BINPUT
            memo[content[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[_number(content, at, 4)] = stack[-1]
            at += 4
        elif code == 0x95:  # FRAME: a length that helps who reads a stream
            at += 8
        elif code == 0x80:  # PROTO
            at += 1
        elif code == 0x2E:  # STOP
            return stack[-1]
        else:
            raise WrongError(
                f"byte {at - 1:,} is an instruction (0x{code:02x}) that no memory snapshot needs; such a pickle could "
                "run code, and none of it was run"
            )
        if containers + len(stack) + len(marks) + len(memo) > _MOST:
            raise WrongError(f"it holds more than {_MOST:,} lists and dicts")


def _number(content: bytes, at: int, size: int) -> int:
    return int.from_bytes(content[at : at + size], "little")


def _text(content: bytes, at: int, size: int) -> str:
    return content[at : at + size].decode("utf-8", "replace")


def _since(stack: list[Any], marks: list[int]) -> list[Any]:
    """Take what was put on the stack since the last mark."""
    mark = marks.pop()
    items = stack[mark:]
    del stack[mark:]
    return items


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise WrongError(f"it appends to {shown(value)}")
    return value


def _set(target: Any, keys: list[Any], values: list[Any]) -> None:
    if type(target) is not dict:
        raise WrongError(f"it sets items of {shown(target)}")
    if len(keys) != len(values):
        raise IndexError
    for key, value in zip(keys, values, strict=True):
        if type(key) is not str:
            raise WrongError(f"a dict has the key {shown(key)}, where text should stand")
        target[key] = value
