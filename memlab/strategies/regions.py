"""Which modules to checkpoint, and how their `forward` becomes a checkpointed region without any edit.

Patterns are matched against module names such as `blocks.0.attn`: `*` stays within one name, `**` crosses dots, `?` is
one character. (`fnmatch` will not do: its `*` crosses dots, so that `blocks.*` would match `blocks.0.attn` as well.)
"""

from __future__ import annotations

import contextlib
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .. import nest
from ..clock import clean_name, region, unwrapped
from ..errors import MemlabError
from ..nest import near_equal

Forward = Callable[..., Any]
AUTO = "auto"
_NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module: every alias, wrappers rather than what they wrap, the root under its class name."""
    root = unwrapped(model)
    found: dict[str, nn.Module] = {type(root).__name__: root}
    for name, module in root.named_modules(remove_duplicate=False):
        if name:
            found.setdefault(clean_name(name), module)
    return found


def chosen(model: nn.Module, patterns: str | Sequence[str]) -> dict[str, nn.Module]:
    """The modules that the patterns name, each once. Raises MemlabError where there are none, or one within another."""
    names = named_modules(model)
    root = next(iter(names))
    if patterns == AUTO:
        if blocks := _repeated(names):
            return blocks
        raise MemlabError(
            f"no repeated blocks found in {root} (two or more of one class, with layers inside, in a ModuleList or "
            f"Sequential): {_instead(names)}"
        )
    found: dict[int, str] = {}
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        rule = re.compile(regex(pattern))
        matched = [name for name in names if name == pattern or (name != root and rule.fullmatch(name))]
        if not matched:
            near = difflib.get_close_matches(pattern.replace("*", "0"), names, n=4, cutoff=0.3) or list(names)[:4]
            raise MemlabError(f"{pattern!r} matches no module of {root}; near it are {', '.join(near)}")
        for name in matched:
            found.setdefault(id(names[name]), name)
    modules = {name: names[name] for name in found.values()}
    for outer, module in modules.items():
        inside = {id(inner) for inner in module.modules()} - {id(module)}
        for inner, other in modules.items():
            if id(other) in inside:
                raise MemlabError(
                    f"{inner} lies within {outer} and both are matched: checkpoint one of them "
                    "(`*` stays within one name, `**` crosses dots)"
                )
    return modules


def regex(pattern: str) -> str:
    special = {"**": ".*", "*": "[^.]*", "?": "[^.]"}
    return "".join(special.get(part, re.escape(part)) for part in re.split(r"(\*\*|\*|\?)", pattern))


def _repeated(names: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """The outermost children of a ModuleList or Sequential that repeat one class. A class without submodules does not
    count: checkpointing a single layer saves nothing."""
    root = next(iter(names))
    found: dict[str, nn.Module] = {}
    taken: set[int] = set()  # what is found, and everything inside
    for name, container in names.items():
        if not isinstance(container, nn.ModuleList | nn.Sequential) or id(container) in taken:
            continue
        kinds = Counter(type(child) for child in container._modules.values() if _has_children(child))
        for key, child in container._modules.items():
            if child is not None and kinds[type(child)] > 1 and id(child) not in taken:
                found[key if name == root else f"{name}.{key}"] = child
                taken |= {id(module) for module in child.modules()}
    return found


def _instead(names: dict[str, nn.Module]) -> str:
    root, *others = names
    blocks = [name for name in others if _has_children(names[name]) and not isinstance(names[name], _NEVER_CALLED)]
    if blocks:
        return f'name what to checkpoint, e.g. Checkpoint("{blocks[0]}"); candidates are {", ".join(blocks[:8])}'
    if any(isinstance(module, nn.Sequential) and len(module) > 1 for module in names.values()):
        return "checkpoint several of its layers together, e.g. Checkpoint(segments=2)"
    return f'it has single layers only, and checkpointing one saves nothing; Checkpoint("{root}") is the whole model'


def _has_children(module: nn.Module | None) -> bool:
    return module is not None and any(True for _ in module.children())


# ----------------------------------------------------------------------------------------------------------- segments


def segments(model: nn.Module, patterns: str | Sequence[str], count: int) -> tuple[str, nn.Sequential, list[range]]:
    """The Sequential whose consecutive children the patterns name, and those children in `count` near-equal groups."""
    names = named_modules(model)
    root = next(iter(names))
    if patterns == AUTO:
        blocks = _repeated(names)
        container, places = _parent(names, blocks) if blocks else (_longest_sequential(names), None)
    else:
        container, places = _parent(names, chosen(model, patterns))
    name = next(name for name, module in names.items() if module is container)
    if type(container).forward is not nn.Sequential.forward:
        raise MemlabError(
            f"{name} is a {type(container).__name__}, whose loop over its children is in its or your own code: "
            "segments= needs a plain nn.Sequential; checkpoint single blocks instead"
        )
    places = range(len(container)) if places is None else places
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= len(places):
        raise MemlabError(f"{root} has {len(places)} blocks: give 1 to {len(places)} segments, not {count!r}")
    bounds = itertools.accumulate(near_equal(len(places), count), initial=places.start)
    return name, container, [range(start, stop) for start, stop in itertools.pairwise(bounds)]


def _longest_sequential(names: dict[str, nn.Module]) -> Any:
    found = [module for module in names.values() if isinstance(module, nn.Sequential) and len(module) > 1]
    if not found:
        raise MemlabError(
            f"{next(iter(names))} has no nn.Sequential of two or more children, and segments= needs one: "
            "checkpoint single blocks instead, e.g. Checkpoint()"
        )
    return max(found, key=len)  # the first, so the outermost, of equals


def _parent(names: dict[str, nn.Module], modules: dict[str, nn.Module]) -> tuple[Any, range | None]:
    """The container of all `modules` and the places they hold in it (None: all)."""
    if len(modules) == 1 and isinstance(only := next(iter(modules.values())), nn.Sequential):
        return only, None
    wanted = {id(module) for module in modules.values()}
    for container in names.values():
        children = list(container._modules.values())
        places = [place for place, child in enumerate(children) if id(child) in wanted]
        if {id(children[place]) for place in places} == wanted:
            if places != list(range(places[0], places[-1] + 1)):
                raise MemlabError(f"{', '.join(modules)} are not consecutive, and a segment runs from one to the next")
            return container, range(places[0], places[-1] + 1)
    raise MemlabError(
        f"segments= needs children of one nn.Sequential, and {', '.join(modules)} are not: name those of one, "
        'e.g. Checkpoint("layer1.*", segments=2)'
    )


# ------------------------------------------------------------------------------------------------- checkpointed forward


def checkpointed(module: nn.Module, name: str, options: dict[str, Any], called: Callable[[str], object]) -> Forward:
    """`module.forward` as one checkpointed region; tells `called` its name at each call."""
    if isinstance(module, _NEVER_CALLED):
        raise MemlabError(f'{name} is a {type(module).__name__}, never called itself: match what it holds, "{name}.*"')
    forward = module.forward

    def in_region(*args: Any, **kwargs: Any) -> Any:
        with region(module):
            return forward(*args, **kwargs)

    def run(*args: Any, **kwargs: Any) -> Any:
        called(name)
        with _inputs_kept(name, module, (args, kwargs)):
            return checkpoint(in_region, *args, use_reentrant=False, **options, **kwargs)

    return run


def checkpointed_segments(
    container: nn.Sequential,
    name: str,
    groups: list[range],
    options: dict[str, Any],
    called: Callable[[str], object],
) -> Forward:
    """A Sequential's forward with each group of children as one checkpointed region, the others as they are."""

    def children(places: range, value: Any) -> Any:
        for place in places:
            value = container[place](value)
        return value

    def in_region(group: range, value: Any) -> Any:
        with region(container):
            return children(group, value)

    def run(input: Any) -> Any:
        called(name)
        input = children(range(groups[0].start), input)
        for group in groups:
            with _inputs_kept(f"{name}, children {group.start} to {group.stop - 1},", container, input):
                input = checkpoint(in_region, group, input, use_reentrant=False, **options)
        return children(range(groups[-1].stop, len(container)), input)

    return run


@contextlib.contextmanager
def _inputs_kept(name: str, module: nn.Module, inputs: Any) -> Iterator[None]:
    """Raise where a region edits its own input in place: the second run would begin with what the first one left."""
    versions = [(tensor, tensor._version) for tensor in nest.tensors(inputs)]
    yield
    edited = [tuple(tensor.shape) for tensor, version in versions if tensor._version != version]
    if edited and torch.is_grad_enabled():
        inside = [key for key, inner in module.named_modules() if getattr(inner, "inplace", False) is True]
        who = f" (with inplace=True in it: {', '.join(inside[:4])})" if any(inside) else ""
        raise MemlabError(
            f"{name} edits its own input, a tensor of shape {edited[0]}, in place{who}, and that input is what "
            "checkpointing keeps for the second run: use inplace=False there, or checkpoint other blocks"
        )


@contextlib.contextmanager
def patched(module: nn.Module, forward: Forward) -> Iterator[None]:
    """`forward` as the instance's own while this is open, past any `__setattr__`."""
    if isinstance(module, torch.jit.ScriptModule):
        raise MemlabError(
            f"{module.original_name} is a ScriptModule, whose forward cannot be replaced: checkpoint the module that "
            "it was scripted from"
        )
    own = vars(module)
    before = own.get("forward")
    own["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del own["forward"]
        else:
            own["forward"] = before
