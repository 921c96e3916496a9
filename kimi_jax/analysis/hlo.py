"""Reads a compiled program's text: its collectives with loops counted, and its largest buffers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

KINDS = (
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute"),
    "collective-broadcast",
)
_BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPCODE = re.compile(r"\s([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<= ]*)\]")
_COLLECTIVE = re.compile(rf"^({'|'.join(KINDS)})(-start)?$")
_FOLLOWED = {"while", "fusion", "call", "conditional", "async-start", "custom-call"}
_COPIES = {"copy", "bitcast", "copy-start", "copy-done"}
_NEEDED = {"constant", "compare", "add", "tuple", "get-tuple-element", "parameter"} | _COPIES


@dataclass(frozen=True)
class Collective:
    kind: str
    axes: tuple[str, ...]
    """Mesh axes over which it communicates."""
    group: int
    """Devices that take part together."""
    bytes: int
    """What one device receives in one execution, by the usual ring algorithms: of a result of n bytes in a group of
    g, (g-1)/g n for an all-gather or all-to-all, twice that for an all-reduce, (g-1) n for a reduce-scatter, n for a
    permute. A ragged all-to-all is taken as full."""
    count: int
    """Executions in one run of the program: the product of the trip counts of the loops around it."""
    known: bool
    """False: a loop's trip count is not in the text, and was taken as one."""
    name: str
    """JAX's name of the operation."""

    @property
    def total(self) -> int:
        return self.bytes * self.count


@dataclass(frozen=True)
class Buffer:
    name: str
    """JAX's name of the operation that writes it, else the compiler's."""
    shape: str
    """Of its largest array, per device."""
    bytes: int


@dataclass
class _Instruction:
    name: str
    opcode: str
    shape: str
    operands: list[str]
    attributes: str


@dataclass
class _Computation:
    entry: bool
    root: str = ""
    instructions: dict[str, _Instruction] = field(default_factory=dict)


def collectives(text: str | Iterable[str], mesh: dict[str, int]) -> list[Collective]:
    """The collectives of an optimised HLO module.

    Args:
        text: `compiled.as_text()`, or its lines.
        mesh: axis -> size, in the mesh's order; partition p is the p-th device of the mesh.

    Returns:
        One entry an instruction, those inside loops with their execution count. Conditional branches count as taken.
        A `-start` stands for its `-done`.
    """
    computations = _parse(text)
    found: list[Collective] = []
    axes = tuple(mesh)
    sizes = tuple(mesh.values())

    def visit(name: str, count: int, known: bool) -> None:
        for each in computations[name].instructions.values():
            match = _COLLECTIVE.match(each.opcode)
            if match:
                found.append(_collective(each, match[1], bool(match[2]), axes, sizes, count, known))
            elif each.opcode == "while":
                body, condition = _called(each, "body"), _called(each, "condition")
                trips = _trip_count(computations, computations[name], each, body, condition)
                visit(body, count * (1 if trips is None else trips), known and trips is not None)
            elif each.opcode in _FOLLOWED:
                for called in _branches(each):
                    if called in computations:
                        visit(called, count, known)

    visit(next(name for name, c in computations.items() if c.entry), 1, True)
    return found


def largest_buffers(assignment: str, text: str, count: int) -> list[Buffer]:
    """The largest distinct buffers in HBM, arguments included, of a buffer assignment that XLA dumped.

    Args:
        assignment: `*-buffer-assignment.txt`.
        text: the program, for the names of operations.
        count: how many.
    """
    places: dict[tuple[int, int], tuple[int, str, str]] = {}
    allocation, parameter, default = -1, "", False
    for line in assignment.splitlines():
        head = re.match(r"allocation (\d+): size (\d+)(.*)", line)
        if head:
            allocation, default = int(head[1]), not re.search(r"color [1-9]|thread-local", head[3])
            parameter = "argument " if "parameter" in head[3] else ""
            continue
        value = re.match(r" value: <\d+ (\S+?)(?:\{[\d,]*\})? @\d+> \(size=(\d+),offset=(\d+)\): (.*)", line)
        if value and default:
            key, size = (allocation, int(value[3])), int(value[2])
            if size > places.get(key, (0,))[0]:
                places[key] = size, parameter + value[1], value[4]
    top = sorted(places.values(), reverse=True)[:count]
    names = _operation_names(text, {name.split()[-1] for _, name, _ in top})
    return [Buffer(names.get(name.split()[-1], name), re.sub(r"\{.*", "", shape), size) for size, name, shape in top]


def hbm_total(report: str) -> int:
    """Bytes of all buffers in HBM, from `*-memory-usage-report.txt`: what the compiler compares with the capacity."""
    return int(re.findall(r"Memory Space: default.*\nTotal bytes: (\d+)", report)[-1])


def dumped(folder: Path) -> tuple[str, str, str]:
    """(buffer assignment, memory usage report, program) that one compilation with `xla_dump_to` left; the program is
    there even when it did not fit."""
    largest = lambda ending: max(folder.glob(f"*{ending}"), key=lambda f: f.stat().st_size)  # noqa: E731
    program = "after_optimizations.txt"
    return tuple(  # type: ignore[return-value]
        largest(ending).read_text() for ending in ("-buffer-assignment.txt", "-memory-usage-report.txt", program)
    )


def shape_bytes(shape: str) -> int:
    """Bytes of all arrays in an HLO shape, layouts' padding left out.

    >>> shape_bytes("(bf16[4,8]{1,0:T(8,128)(2,1)}, f32[], s4[3])")
    70
    """
    bits = 0
    for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", shape)):
        width = _BITS.get(dtype)
        if width is None:
            width = int(re.match(r"[a-z]+(\d+)", dtype)[1])  # type: ignore[index]
        size = width * int(np.prod([int(d.replace("<=", "")) for d in dims.split(",") if d.strip()], dtype=object))
        bits += size if width % 8 == 0 else -(-size // 8) * 8
    return bits // 8


def _parse(text: str | Iterable[str]) -> dict[str, _Computation]:
    """The computations, with the instructions that collectives and trip counts need."""
    computations: dict[str, _Computation] = {}
    current = None
    for line in text.splitlines() if isinstance(text, str) else text:
        if not line.startswith(" "):
            header = _HEADER.match(line.rstrip())
            current = computations.setdefault(header[2], _Computation(bool(header[1]))) if header else None
            continue
        name, equals, rest = line.strip().partition(" = ")
        if current is None or not equals:
            continue
        root, name = name.startswith("ROOT "), name.removeprefix("ROOT ").lstrip("%")
        cut = _closing(rest, 0) + 1 if rest.startswith("(") else 0
        match = _OPCODE.search(rest, max(cut - 1, 0))
        if match is None:
            continue
        opcode = match[1]
        if root:
            current.root = name
        if opcode in _NEEDED or opcode in _FOLLOWED or _COLLECTIVE.match(opcode):
            end = _closing(rest, match.end() - 1)
            inside = rest[match.end() : end]
            operands = [inside] if opcode in ("constant", "parameter") else re.findall(r"%([\w.\-]+)", inside)
            current.instructions[name] = _Instruction(name, opcode, rest[: match.start()], operands, rest[end + 1 :])
    return computations


def _closing(text: str, start: int) -> int:
    """Place of the parenthesis that closes the one at `start`."""
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _called(each: _Instruction, attribute: str) -> str:
    return re.search(rf"\b{attribute}=%?([\w.\-]+)", each.attributes)[1]  # type: ignore[index]


def _branches(each: _Instruction) -> list[str]:
    found = re.findall(r"\b(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", each.attributes)
    for group in re.findall(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}", each.attributes):
        found += re.findall(r"[\w.\-]+", group)
    return found


def _trip_count(computations, outer: _Computation, loop: _Instruction, body: str, condition: str) -> int | None:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if known:
        return int(known[1])
    inside = computations[condition]
    test = inside.instructions.get(inside.root)
    if test is not None and test.opcode == "fusion":  # the comparison may be wrapped
        wrapped = computations[_branches(test)[0]]
        arguments, inner = test.operands, wrapped.instructions.get(wrapped.root)
        if inner is None or inner.opcode != "compare":
            return None
        places = [wrapped.instructions.get(name) for name in inner.operands]
        if any(place is None or place.opcode not in ("parameter", "constant") for place in places):
            return None
        sides = [
            place if place.opcode == "constant" else inside.instructions.get(arguments[int(place.operands[0])])
            for place in places
            if place is not None
        ]
        test = inner
    elif test is not None and test.opcode == "compare":
        sides = [inside.instructions.get(name) for name in test.operands]
    else:
        return None
    index = next((side for side in sides if side is not None and side.opcode == "get-tuple-element"), None)
    limit = next((side for side in sides if side is not None and side.opcode == "constant"), None)
    if index is None or limit is None or sides[0] is not index or "direction=LT" not in test.attributes:
        return None
    place = int(re.search(r"index=(\d+)", index.attributes)[1])  # type: ignore[index]
    start = _constant(outer, _element(outer, loop.operands[0], place))
    inner_body = computations[body]
    moved = _source(inner_body, _element(inner_body, inner_body.root, place))
    if start is None or moved is None or moved.opcode != "add":
        return None
    step = next((value for name in moved.operands if (value := _constant(inner_body, name)) is not None), None)
    if not step:
        return None
    return max(0, -(-(int(limit.operands[0]) - start) // step))


def _source(computation: _Computation, name: str | None) -> _Instruction | None:
    """The instruction that a value comes from, copies of it left out."""
    each = computation.instructions.get(name or "")
    while each is not None and each.opcode in _COPIES:
        each = computation.instructions.get(each.operands[0])
    return each


def _element(computation: _Computation, name: str, place: int) -> str | None:
    """Name of an element of a tuple."""
    each = _source(computation, name)
    return each.operands[place] if each is not None and each.opcode == "tuple" else None


def _constant(computation: _Computation, name: str | None) -> int | None:
    each = _source(computation, name)
    if each is None or each.opcode != "constant" or not re.fullmatch(r"-?\d+", each.operands[0]):
        return None
    return int(each.operands[0])


def _collective(each: _Instruction, kind: str, start: bool, axes, sizes, count: int, known: bool) -> Collective:
    shape = each.shape
    if start and shape.startswith("(") and kind != "all-reduce":
        shape = _elements(shape)[1]  # (operands, results, ..)
    size = shape_bytes(shape)
    pairs = re.search(r"source_target_pairs=\{(.*?)\}(?=[,\s]|$)", each.attributes)
    if kind == "collective-permute" and pairs:
        groups = np.array(re.findall(r"\{?(\d+),(\d+)\}?", pairs[1]), np.int64).reshape(-1, 2)
        varying, group = _varying(groups, sizes), 2
    else:
        varying, group = _groups(_replica_groups(each.attributes), sizes)
    received = {
        "all-gather": size * (group - 1) // group,
        "all-to-all": size * (group - 1) // group,
        "ragged-all-to-all": size * (group - 1) // group,
        "all-reduce": 2 * size * (group - 1) // group,
        "reduce-scatter": size * (group - 1),
    }.get(kind, size)
    operation = re.search(r'op_name="([^"]*)"', each.attributes)
    names = tuple(axes[i] for i in varying)
    return Collective(kind, names, group, received, count, known, operation[1] if operation else each.name)


def _elements(shape: str) -> list[str]:
    """The outermost elements of a tuple's shape."""
    parts, depth, start = [], 0, 1
    for match in re.finditer(r"[(){}\[\],]", shape):
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(match[0], 0)
        if (match[0] == "," and depth == 1) or depth == 0:
            parts.append(shape[start : match.start()].strip())
            start = match.end()
    return parts


def _replica_groups(attributes: str) -> str:
    found = re.search(
        r"replica_groups=(mesh\[.*?\](?:, device_ids=\(.*?\))? \{[^}]*\}|\{\{.*?\}\}|\{\}|\[[^ ,]*(?:,[^ ]*)*)",
        attributes,
    )
    return found[1].rstrip(",") if found else "{}"


@lru_cache(maxsize=4096)
def _groups(text: str, sizes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """(mesh axes that vary inside the groups, devices in a group) of a `replica_groups` attribute."""
    devices = int(np.prod(sizes, dtype=np.int64))
    if text.startswith("mesh"):
        groups = _mesh_groups(text, devices)
    elif text.startswith("["):
        groups = _iota(text)
    elif text == "{}":
        groups = np.arange(devices)[None]
    else:
        groups = np.array([[int(i) for i in row.split(",")] for row in re.findall(r"\{([\d,]+)\}", text)])
    return _varying(groups, sizes), groups.shape[1]


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: numbers in the order of the right side, transposed, in the shape of the left."""
    shape, dims, order = re.match(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?", text).groups()  # type: ignore[union-attr]
    numbers = lambda part: [int(n) for n in part.split(",")]  # noqa: E731
    source = numbers(dims or shape)
    ids = np.arange(int(np.prod(source))).reshape(source)
    if order:
        ids = ids.transpose(numbers(order))
    return ids.reshape(numbers(shape))


def _mesh_groups(text: str, devices: int) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}`: groups along named axes, `'b':(2)2` a part of one."""
    named = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", text)}
    order = re.search(r"device_ids=\((\[.*?\](?:T\([\d,]+\))?)\)", text)
    ids = np.arange(devices)
    if order:
        inner = order[1]
        if "<=" not in inner:  # the shape alone is the source
            inner = inner.replace("]", f"]<={inner.split(']')[0]}]", 1)
        source = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", inner)
        assert source is not None
        ids = np.arange(devices).reshape([int(n) for n in source[2].split(",")])
        if source[3]:
            ids = ids.transpose([int(n) for n in source[3].split(",")])
    grouped = re.search(r"\{([^}]*)\}\s*$", text)
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped[1]) if grouped else []
    shape: list[int] = []
    inside: list[int] = []
    for name, size in named.items():
        pieces = [(int(pre), int(width)) for axis, pre, width in parts if axis == name and pre]
        if any(axis == name and not pre for axis, pre, _ in parts):
            inside.append(len(shape))
            shape.append(size)
        elif pieces:
            done = 1
            for pre, width in sorted(pieces):
                if pre > done:
                    shape.append(pre // done)
                inside.append(len(shape))
                shape.append(width)
                done = pre * width
            shape.append(size // done)
        else:
            shape.append(size)
    ids = ids.reshape(shape)
    outside = [axis for axis in range(len(shape)) if axis not in inside]
    width = int(np.prod([shape[axis] for axis in inside], dtype=np.int64))
    return ids.transpose(outside + inside).reshape(-1, width)


def _varying(groups: np.ndarray, sizes: Sequence[int]) -> tuple[int, ...]:
    places = np.stack(np.unravel_index(groups, sizes), -1)
    return tuple(int(axis) for axis in np.flatnonzero((places != places[:, :1]).any((0, 1))))


def _operation_names(text: str, wanted: set[str]) -> dict[str, str]:
    names = {}
    for name, operation in re.findall(r'^\s+(?:ROOT )?%([\w.\-]+) = .*?op_name="([^"]*)"', text, re.MULTILINE):
        if name in wanted:
            names[name] = operation
    return names
