"""`%%memlab`: the cell below it runs as it is, and one sees what it did to memory.

With `%load_ext memlab` once, any cell of training code begins with `%%memlab`: no function or class of ours is in it.

Rule 1. The cell runs in the user's namespace, and its variables stay there. The value of its last line is not shown:
        `_` and `Out` would hold it, and are left alone.
Rule 2. An error in the cell is the cell's: it fails as it would have without us, with its own traceback alone, after
        the summary of what ran.
Rule 3. Each run begins without what the last error holds (`sys.last_traceback`), the only thing that is let go of.
Rule 4. Nothing here is newer than IPython 7.34, which Colab has.
"""

from __future__ import annotations

import argparse
import ast
import base64
import importlib.util
import inspect
import sys
from types import CodeType, TracebackType
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from IPython.display import display

from ..errors import MemlabError
from ..record import record
from ..trace import Trace
from ..views.words import figure_summary


class CellSyntaxError(MemlabError):
    """The cell under `%%memlab` is no Python; shown as the cell's own SyntaxError."""


@magics_class
class MemlabMagics(Magics):
    # None of these decorators has types.
    @magic_arguments()  # type: ignore[untyped-decorator]
    @argument(  # type: ignore[untyped-decorator]
        "--allocator",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="listen to the device's allocator, so that workspace inside operators is seen",
    )
    @argument(  # type: ignore[untyped-decorator]
        "--sources", action="store_true", help="note the line of code behind each allocation (slower)"
    )
    @argument(  # type: ignore[untyped-decorator]
        "-o", "--output", metavar="NAME", help="keep the trace in this variable"
    )
    @cell_magic
    def memlab(self, line: str, cell: str) -> None:
        """Record what the cell does to memory; print the summary and show the figure.

        The value of the cell's last line is not shown. Variables of the cell stay.
        """
        shell: Any = self.shell
        options = parse_argstring(self.memlab, line)
        if options.output is not None and not options.output.isidentifier():
            raise UsageError(f"-o {options.output}: the trace is kept in a variable, and this is no name for one")
        code = _compiled(cell, shell)
        _let_go_of_last_error(shell)
        failure: BaseException | None = None
        try:
            with record(allocator=options.allocator, sources=options.sources) as trace:
                try:
                    exec(code, shell.user_ns)
                except BaseException as error:
                    failure = error
                    raise
        except BaseException as error:
            if error is not failure:
                raise _in_one_line(error) from None
        if options.output is not None:
            shell.user_ns[options.output] = trace
        _show(trace)
        if failure is not None:
            _show_alone(failure, code, shell)
            raise failure


def _compiled(cell: str, shell: Any) -> CodeType:
    """The cell as IPython would compile it; its lines can be shown in a traceback."""
    if not cell.strip():
        raise UsageError("%%memlab records the cell below it, and that is empty")
    transformed = shell.transform_cell(cell)
    name = shell.compile.cache(transformed, shell.execution_count, raw_code=cell)
    try:
        tree = shell.transform_ast(shell.compile.ast_parse(transformed, filename=name))
        flags = shell.compile.flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        code: CodeType = compile(tree, name, "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        wrong = CellSyntaxError(f"the cell under %%memlab is no Python: {error}")
        shown = shell.SyntaxTB.structured_traceback(type(error), error, [])
        _render_as(wrong, shown)
        raise wrong from None
    if code.co_flags & inspect.CO_COROUTINE:
        raise UsageError(
            "%%memlab records code that runs to its end, and this cell waits for other code with a top-level "
            "`await` (or `async for`, `async with`), whose memory would be in the trace: await in a cell of its own"
        )
    return code


# -- what is shown -----------------------------------------------------------------------------------------------------


def _show(trace: Trace) -> None:
    print(trace, trace.explain(), sep="\n\n", flush=True)
    if trace.operators and importlib.util.find_spec("matplotlib") is not None:
        from ..views.plots import png

        image = base64.b64encode(png(trace.plot())).decode("ascii")
        display({"image/png": image, "text/plain": figure_summary(trace)}, raw=True)


def _show_alone(error: BaseException, code: CodeType, shell: Any) -> None:
    """Let IPython show the error from the cell's own frame on, without those that led to it, nor ours (Rule 2)."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code is not code:
        tb = tb.tb_next
    _leave_out_ours(tb)
    _render_as(error, shell.InteractiveTB.structured_traceback(type(error), error, tb, tb_offset=0))


def _leave_out_ours(tb: TracebackType | None) -> None:
    """Operators that are recorded run below a frame of memlab's and one by which that calls them."""
    while tb is not None:
        while (below := tb.tb_next) is not None and _module(below).partition(".")[0] == "memlab":
            tb.tb_next = below.tb_next
            if tb.tb_next is not None and _module(tb.tb_next) == "torch._ops":
                tb.tb_next = tb.tb_next.tb_next
        tb = tb.tb_next


def _module(tb: TracebackType) -> str:
    return str(tb.tb_frame.f_globals.get("__name__", ""))


def _render_as(error: BaseException, lines: list[str]) -> None:
    error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # IPython asks for it


def _in_one_line(error: BaseException) -> BaseException:
    """What memlab itself refuses is said without a traceback of its insides."""
    return UsageError(str(error)) if isinstance(error, MemlabError) else error


# -- what is let go of -------------------------------------------------------------------------------------------------


def _let_go_of_last_error(shell: Any) -> None:
    """What the last error's calls held is released: their variables may be the tensors of the last run (Rule 3). Each
    traceback is cut into its single frames, as IPython too keeps one: a frame that is only cleared may have been read,
    and then holds a copy of its variables."""
    last = getattr(shell, "last_execution_result", None)
    for error in (getattr(sys, "last_value", None), getattr(last, "error_in_exec", None)):
        while error is not None:
            tb, error.__traceback__ = error.__traceback__, None
            while tb is not None:
                following, tb.tb_next = tb.tb_next, None
                tb = following
            error = error.__cause__ or error.__context__
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)
