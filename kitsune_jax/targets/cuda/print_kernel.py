"""Printing a laid-out kernel, of one phase or of several, as one ``.cu`` file that is meant to be read.

Comes in: ``Layout`` or ``CallLayout``, and the kinds of its stages. Goes out: CUDA C++ that includes only ``kitsune/kitsune.h``.
Nothing is decided here.
"""

from __future__ import annotations

import dataclasses
import textwrap
from collections import Counter
from collections.abc import Sequence

from kitsune_jax.program.ir import TileProgram, walk
from kitsune_jax.targets.cuda.call_layout import CallLayout, PartLayout, Source
from kitsune_jax.targets.cuda.ir import Spelling, indented
from kitsune_jax.targets.cuda.layout import Kind, Layout, entry_vectors

# --- The functions of a kind of stages: consumer and loader -----------------------------------------------------------------------


def functions(program: TileProgram, kind: Kind) -> tuple[str, str]:
    """(the consumers' function, the loader's function)."""
    spelling = Spelling(frozenset((c.name, c.key) for c in kind.fields), _operators(program, kind))
    given, place = (
        "const Params& p, Header& header, u8* shared, Share share",
        f", const Place{kind.number}& at" if kind.fields else "",
    )

    def function(title: str, lines: list[str]) -> str:
        unused = ["(void)at;"] if place and not any("at." in line for line in lines) else []
        return _function(f"{title}, u32 slab{place})", [*unused, *lines])

    loader = ["(void)slab, (void)p, (void)header, (void)shared, (void)share;"]
    loader += [] if kind.code.tiles is None else kind.code.tiles.lines(spelling)
    loader += kind.code.loader.lines(spelling)
    consume = function(f"consume{kind.number}({given}, u32 group, u32 instance", kind.code.consumer.lines(spelling))
    return "\n".join([*_comment(program, kind), consume]), function(f"load{kind.number}({given}", loader)


# Operators in words, where the name of the operator says too little or too much. Others go by their own names.
_WORDS = {
    "broadcast_in_dim": "broadcast",
    "convert_element_type": "convert",
    "matmul_sink": "weight gradient",
    "select_n": "select",
    "sink": "fold over the rows",
    "sink_at": "fold by index",
}
_MOVES = {"broadcast_in_dim", "convert_element_type", "load", "load_slice", "pop", "push", "reshape", "store", "store_slice"}
_ENDS = (("Reads", lambda q: q.consumers), ("Writes", lambda q: (q.producer,)))
_WIDTH = 120  # of a line of comments


def _operators(program: TileProgram, kind: Kind) -> dict[int, str]:
    """The operator that makes each value, by which the code of a stage names it. Names that stages share have no operator."""
    if len(kind.stages) > 1:
        return {}
    body = list(walk(program.stages[kind.number].body))
    carries = {v: "carry" for i in body if i.block is not None for v in i.block.carries}
    return {v: _WORDS.get(i.kind, i.kind) for i in body for v in i.outputs} | carries


def _comment(program: TileProgram, kind: Kind) -> list[str]:
    """The comment of a kind of stages: their operators, the rows of a tile, and their queues."""
    counts = Counter(_WORDS.get(i.kind, i.kind) for i in walk(program.stages[kind.number].body) if i.kind not in _MOVES)
    computed = ", ".join(word if n == 1 else f"{n} {word}" for word, n in counts.items()) or "copies"
    rows = kind.code.consumer.loop.tile_rows
    text = f"{_listed('Stage', kind.stages)}: {computed}; a tile has {rows} rows."
    queues = [(word, [k for k, q in enumerate(program.queues) if set(ends(q)) & {*kind.stages}]) for word, ends in _ENDS]
    text += "".join(f" {word} {_listed('queue', found)}." for word, found in queues if found)
    return [f"// {line}" for line in textwrap.wrap(text, _WIDTH)]


def _listed(word: str, numbers: Sequence[int]) -> str:
    return f"{word}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


# --- A kernel of one phase --------------------------------------------------------------------------------------------------------


def source(at: Layout, kinds: list[Kind]) -> str:
    """The source of the kernel ``kitsune_region``."""
    head = f"// {at.name}: {summary(at)}\n{_includes(at.stamped)}constexpr int kLanes = {at.a.lanes};\n{constants(at)}"
    fields = [f"TensorMap {m.name};" for m in at.maps]
    fields += [*params(at), *(f"const void* filled{k};" for k, _ in at.filled)]  # their memory becomes that of the results
    fields += [f"void* out{k};" for k in range(len(at.program.outputs))]
    fields += ["u8* workspace;", *_stamp_params(at.stamped), "KITSUNE_DEVICE u8* zeroed() const { return workspace; }"]
    return "\n".join([head, struct("Params", fields), *roles(at, kinds, True), "}  // namespace\n", _entry(at)])


def _includes(stamped: bool) -> str:
    more = '#include "kitsune/timeline.h"\n' if stamped else ""
    return f'#include "kitsune/kitsune.h"\n{more}\nnamespace {{\n\nusing namespace kitsune;\n\n'


def _stamp_params(stamped: bool) -> list[str]:
    """The last fields of the kernel's ``Params``."""
    return ["TimelineHead* timeline;", "u64 timeline_kernel;"] if stamped else []


_RECORDERS = "Recorder recorders[kLanes];"  # first in shared memory


def summary(at: Layout) -> str:
    """The first comment of a part: its rows, arrangement and stages."""
    p, a = at.program, at.a
    how, stages = "spatial" if a.spatial else "vertical", ", ".join(s.name for s in p.stages)
    return f"{p.rows} rows, {how}, {a.instances(p)} instances of {a.ctas} CTAs, {a.lanes} lanes; stages {stages}"


def constants(at: Layout) -> str:
    sizes = f"constexpr i64 kRows = {at.program.rows};\nconstexpr u32 kTiles = {at.a.tiles(at.program)};\n"
    if not at.batch_tiles:
        return sizes
    rows = at.program.rows // max(1, at.program.batches)
    sizes += f"constexpr u32 kBatchTiles = {at.batch_tiles};\nconstexpr i64 kBatchRows = {rows};\n"
    return f"{sizes}constexpr u32 kTogether = {at.batches_at_once};\n"


def params(at: Layout) -> list[str]:
    """The fields of a part's operands, in their order."""
    fields = [f"const void* in{k};" for k in at.operands.inputs]
    fields += [f"{type_} {name};" for type_, name, _ in at.packed]
    return fields + [f"const void* table{k};" for k in range(len(at.operands.tables))]


def struct(name: str, fields: list[str]) -> str:
    return f"struct {name} {{\n" + "".join(f"  {f}\n" for f in fields) + "};\n"


def roles(at: Layout, kinds: list[Kind], recorders: bool) -> list[str]:
    """The code of a part after its ``Params``: its barriers (``Header``, ``init``) and its roles (``load``, ``consume``).
    ``recorders``: those of a stamped kernel are in its ``Header``."""
    consumers, loaders = zip(*(functions(at.program, kind) for kind in kinds), strict=True)
    barriers = _barriers(at)
    parts = [struct("Header", [*([_RECORDERS] if at.stamped and recorders else []), *(f"{member};" for member, _ in barriers)])]
    if at.a.streamed:
        queue = f"WeightQueue<{at.streaming.depth}, {at.streaming.slot}, kLanes, {at.a.cluster}>"
        parts[0] += f"using Weights = {f'SummedWaits<{queue}, 0>' if at.stamped else queue};\n"
    parts += [*(_places(kind) for kind in kinds if kind.fields), *consumers, *loaders]
    if len(kinds) < len(at.stages):
        parts.append(_role_table(at, kinds))
    given, ranks = "const Params& p, Header& header, u8* base, Share share", _ranks(at, kinds)
    load = [*ranks, *_calls(at, kinds, "load{s}(p, header, base, share, {slab}{at});")]
    consume = [*ranks, *_calls(at, kinds, "consume{s}(p, header, base, share, group, instance, {slab}{at});")]
    init = _function("init(Header& header)", [line for _, lines in barriers for line in lines])
    return [*parts, init, _function(f"load({given})", load), _function(f"consume({given}, u32 group)", consume)]


def _function(title: str, lines: list[str]) -> str:
    return "\n".join([f"KITSUNE_DEVICE void {title} {{", *indented(lines), "}\n"])


def _ranks(at: Layout, kinds: list[Kind]) -> list[str]:
    """Declares this CTA's place in its pipeline instance, and its role."""
    ctas, role = at.a.ctas, ["const Role role = kRoles[rank];"] if len(kinds) < len(at.stages) else []
    instance, rank = ("share.block", "0") if ctas == 1 else (f"share.block / {ctas}", f"share.block % {ctas}")
    return [f"const u32 instance = {instance}, rank = {rank};", "(void)instance, (void)rank;", *role]


def _barriers(at: Layout) -> list[tuple[str, list[str]]]:
    """The members of ``Header``, each with the lines in which one thread initialises it."""

    def of_lanes(member: str, init: str, name: str) -> list[str]:
        return [f"for (int l = 0; l < kLanes; ++l) {init};", f'name({member}, "{name}");']

    found = [("Mbar resident", ["init_resident(header.resident);", 'name(&header.resident, "resident");']), ("u32 flags[4]", [])]
    if most := max(len(stage.shape.staged) for stage in at.stages):
        staged = [f"header.staged[{k}]" for k in range(most)]
        inits = [of_lanes(member, f"StagedRows<u8, 1>::init({member}[l])", "staged") for member in staged]
        found.append((f"Mbar staged[{most}][kLanes][2]", [line for lines in inits for line in lines]))
    if at.a.streamed:
        found.append(
            (f"Ring<{at.streaming.depth}> weights", ["Weights::init(header.weights);", 'name(&header.weights, "weights");'])
        )
    if at.ring is not None:
        found.append((f"{at.ring.type}::Barriers tiles", [f"{at.ring.type}::init(header.tiles);", 'name(&header.tiles, "tiles");']))
    queues = [(q, at.program.queues[q]) for q in at.queue_at]
    rings = [(f"queue{q}", entry_vectors(at.program, at.a, q), queue.depth, f"{at.mask(queue.consumers)}") for q, queue in queues]
    rings += [(x.ring.name, x.vectors, x.depth, f"{(1 << at.a.ctas) - 1}u") for x in at.exchanges]
    for name, vectors, depth, readers in rings:
        init = f"ClusterQueue<{vectors}, {depth}>::init(header.{name}[l], {readers})"
        found.append((f"Ring<{depth}> {name}[kLanes]", of_lanes(f"header.{name}", init, name)))
    return found


def _constants(type_: str, fields: list[str], name: str, rows: list[str]) -> list[str]:
    """A struct, and an array of such structs in constant memory."""
    head = [f"struct {type_} {{", *(f"  {field};" for field in fields), "};", f"KITSUNE_CONSTANT {type_} {name}[] = {{"]
    return [*head, *(f"    {row}" for row in rows), "};"]


def _places(kind: Kind) -> str:
    """The table of the constants in which stages of one kind differ."""
    head = f"// Where things lie for stages {', '.join(map(str, kind.stages))}, which run the same code"
    fields = [c.declaration.format(f"{c.name}{c.key}") for c in kind.fields]
    rows = [f"{{{', '.join(place)}}}," for place in kind.places]
    return "\n".join([head, *_constants(f"Place{kind.number}", fields, f"kPlaces{kind.number}", rows), ""])


def _role_table(at: Layout, kinds: list[Kind]) -> str:
    """The table of what the CTA of each rank runs, for kernels in which stages share code."""
    head = [
        "// What each CTA of an instance runs: the functions of a kind of stages, named for the first of them, with a row of its",
        "// places, on a slab.",
    ]
    where = {s: (kind.number, place) for kind in kinds for place, s in enumerate(kind.stages)}
    rows = []
    for s, split in enumerate(at.a.split):
        kind, place = where[s]
        rows.append(f"{', '.join(f'{{{kind}, {place}, {slab}}}' for slab in range(split))},  // stage {s}")
    return "\n".join([*head, *_constants("Role", ["u32 kind, place, slab"], "kRoles", rows), ""])


def _entry(at: Layout) -> str:
    declared, section = [_GROUP, "const Share share = Share::all();"], f"section(share.block % {at.a.ctas}, group);"
    load = f"if ({'fetches()' if at.ring is None else 'fetches() || fetches_tiles()'}) load(p, header, base, share);"
    consume = _stamped(at.stamped, ["consume(p, header, base, share, group - 1);"])
    return _kernel(at, "Header", declared, ["init(header);"], [section], [load], consume)


def _stamped(stamped: bool, lines: list[str]) -> list[str]:
    """``lines``, in which the consumers' work is recorded."""
    return ["begin_timeline<kLanes>(p.timeline, p.timeline_kernel);", *lines, "end_timeline();"] if stamped else lines


_GROUP = "const u32 group = thread_id() / kGroupThreads;"


def _kernel(
    at: Layout, headers: str, declared: list[str], init: list[str], start: list[str], load: list[str], consume: list[str]
) -> str:
    """The kernel: after ``start`` its first warpgroup runs ``load``, and the others run ``consume``. ``headers``: the struct of all
    barriers, which one thread initialises by ``init``."""
    clusters, name = at.a.cluster > 1, headers.lower()
    lines = [f"{headers}& {name} = shared<{headers}>();", f"u8* const base = reinterpret_cast<u8*>(&{name});", *declared]
    lines += ["if (thread_id() == 0) {", *indented((*init, "fence_mbar_init();")), "}"]
    lines += ["cluster_sync();" if clusters else "block_sync();", *start]
    lines += ["if (group == 0) {", *indented(("become_loader<kLanes>();", *load))]
    lines += ["} else {", *indented(("become_consumer<kLanes>();", *consume)), "}"]
    lines += ["cluster_sync();  // no CTA leaves while another still writes to its shared memory"] if clusters else []
    fits = f"static_assert(sizeof({headers}) <= {at.header_bytes});\n"
    return "\n".join([fits, f"KITSUNE_KERNEL(kitsune_region, Params, p, {at.a.threads}) {{", *indented(lines), "}\n"])


def _calls(at: Layout, kinds: list[Kind], call: str) -> list[str]:
    """Calls the function of the stage that the CTA runs."""
    lines, shares = [], len(kinds) < len(at.stages)
    for k, kind in enumerate(kinds):
        first, split = at.a.first_rank(kind.number), at.a.split[kind.number]
        place = f", kPlaces{kind.number}[role.place]" if kind.fields else ""
        slab = "0" if split == 1 else "role.slab" if shares else f"rank - {first}"
        text = call.format(s=kind.number, slab=slab, at=place)
        if len(kinds) == 1:
            return [text]
        word = "if" if k == 0 else "else if"
        mine = f"role.kind == {kind.number}" if shares else f"rank < {first + split}"
        lines.append(f"{word} ({mine}) {text}" if k + 1 < len(kinds) else f"else {text}")
    return lines


# --- A kernel of several phases ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Group:
    """Parts that run the same code, in the order of their phases."""

    name: str
    text: str
    members: tuple[PartLayout, ...]

    @property
    def types(self) -> list[str]:
        """The types of the pointers of their ``Params``."""
        return [field.rsplit(" ", 1)[0] for field in _part_params(self.members[0].layout)]


def source_of_phases(call: CallLayout, kinds: list[list[Kind]]) -> str:
    """The source of the kernel ``kitsune_region``.

    A part is a namespace with the contents of a kernel of its own. Parts with the same text share one namespace, and those of one
    phase run in a loop, so that the updates of thirty parameters are compiled once. Every role runs the parts in their order. There
    is a barrier of the CTA between two parts, and one of the grid between two phases.
    """
    groups, a = _groups(call, kinds), call.parts[0].layout.a
    phases = len({part.phase for part in call.parts})
    head = [
        f"// {call.name}: {len(call.parts)} parts in {phases} phases, {call.grid} CTAs, {a.lanes} lanes",
        "#define KITSUNE_PHASES 1",
        _includes(call.stamped) + f"constexpr int kLanes = {a.lanes};\n",
    ]
    spaces = [f"namespace {g.name} {{\n\n{g.text}\n}}  // namespace {g.name}\n" for g in groups]
    params = struct("Params", [*(f"{buffer};" for buffer in call.buffers), *_stamp_params(call.stamped)])
    recorders = [_RECORDERS] if call.stamped else []
    headers = struct("Headers", [*recorders, *(f"{g.name}::Header {g.name}[{len(g.members)}];" for g in groups)])
    given = [_given(call, g) for g in groups]
    return "\n".join([*head, *spaces, params, headers, *given, "}  // namespace\n", _entry_of_phases(call, groups)])


def _groups(call: CallLayout, kinds: list[list[Kind]]) -> list[_Group]:
    """The groups of parts, in the order of their first parts."""
    by_text: dict[str, list[int]] = {}
    for k, (part, own) in enumerate(zip(call.parts, kinds, strict=True)):
        at = part.layout
        fields = struct("Params", [*_part_params(at), "KITSUNE_DEVICE u8* zeroed() const { return counters; }"])
        text = "\n".join([f"// {summary(at)}\n{constants(at)}", fields, *roles(at, own, False)])
        by_text.setdefault(text, []).append(k)
    return [_Group(f"part{members[0]}", text, tuple(call.parts[k] for k in members)) for text, members in by_text.items()]


def _part_params(at: Layout) -> list[str]:
    """The fields of a part's ``Params``, in the order of its ``sources``."""
    return [*params(at), *(f"void* out{k};" for k in range(len(at.program.outputs))), "u8* workspace;", "u8* counters;"]


def _given(call: CallLayout, group: _Group) -> str:
    """The function that makes the ``Params`` of a part. Pointers to data of earlier phases are opaque: it is read after the
    barrier."""
    several, name, pointers = len(group.members) > 1, group.name, list[str]()
    for k, (type_, sources) in enumerate(zip(group.types, zip(*(m.sources for m in group.members), strict=True), strict=True)):
        cast = "reinterpret" if type_ == "const float*" else "static"
        x = f"{cast}_cast<{type_}>(pointer(p, at[{k}]))" if several else _pointer(call, sources[0], type_)
        pointers.append(f"opaque({x})" if any(s.made for s in sources) else x)
    lines = _table(group) if several else []
    lines.append(f"KITSUNE_DEVICE {name}::Params {name}_params(const Params& p{', u32 member' if several else ''}) {{")
    lines += [f"  const Pointer* const at = k{name.title()}[member].pointers;"] if several else []
    return "\n".join([*lines, "  return {", *(f"      {x}," for x in pointers), "  };", "}\n"])


def _pointer(call: CallLayout, source: Source, type_: str) -> str:
    field = call.buffers[source.buffer].split()[-1]
    if source.byte:  # in the workspace, whose type is u8*
        return f"static_cast<{type_}>(p.{field} + {source.byte})"
    return f"p.{field}"


def _table(group: _Group) -> list[str]:
    """The table of the CTAs and pointers of each member of a group."""
    name, rows = group.name.title(), list[str]()
    for m in group.members:
        pointers = ", ".join(f"{{{s.buffer}, {s.byte}}}" for s in m.sources)
        rows.append(f"{{{m.first}, {m.ctas}, {{{pointers}}}}},")
    return _constants(name, ["u32 first, ctas", f"Pointer pointers[{len(group.types)}]"], f"k{name}", rows)


def _entry_of_phases(call: CallLayout, groups: list[_Group]) -> str:
    init = []
    for g in groups:
        several = len(g.members) > 1
        each = f"for (u32 m = 0; m < {len(g.members)}; ++m) " if several else ""
        init.append(f"{each}{g.name}::init(headers.{g.name}[{'m' if several else 0}]);")
    declared = ["u32* const arrived = reinterpret_cast<u32*>(p.workspace);", _GROUP]
    load = _role(call, groups, "if (fetches()) {part}::load({params}, header, base, share);", "")
    barrier = "end_of_phase<kLanes>(arrived, {phase});"
    if call.stamped:
        record = "end_wait(Stamp::kPhase, {phase}, begin); begin_phase({phase} + 1);"
        barrier = f"{{{{ const u32 begin = begin_wait(); {barrier} {record} }}}}"
    consume = _role(call, groups, "{part}::consume({params}, header, base, share, group - 1);", barrier)
    consume = _stamped(call.stamped, consume)
    return _kernel(call.parts[0].layout, "Headers", declared, init, [], load, consume)


def _role(call: CallLayout, groups: list[_Group], run: str, barrier: str) -> list[str]:
    """The parts in their order; ``barrier``: the code between one ``phase`` and the next."""
    phases = sorted({part.phase for part in call.parts})
    lines: list[str] = []
    for n, phase in enumerate(phases):
        lines += [barrier.format(phase=n - 1)] if n and barrier else []
        lines.append(f"// phase {phase}")
        for group in groups:
            if members := [k for k, m in enumerate(group.members) if m.phase == phase]:
                lines += _run(call, group, members, run)
    return lines


def _run(call: CallLayout, group: _Group, members: list[int], run: str) -> list[str]:
    """Runs ``members`` of the group, which are consecutive."""
    ctas, name = group.members[0].layout.a.ctas, group.name
    if len(group.members) == 1:
        place, member, params = f"{group.members[0].first}, {group.members[0].ctas}", "0", f"{name}_params(p)"
    else:
        table = f"k{name.title()}[m]"
        place, member, params = f"{table}.first, {table}.ctas", "m", f"{name}_params(p, m)"
    body = [
        f"const Share share = Share::of({place}, {ctas});",
        "if (share.is_mine()) {",
        f"  {name}::Header& header = headers.{name}[{member}];",
        f"  section({call.parts.index(group.members[members[0]])}, group);",
        f"  {run.format(part=name, params=params)}",
        "  end_of_part<kLanes>();",
        "}",
    ]
    loop = f"for (u32 m = {members[0]}; m < {members[-1] + 1}; ++m) {{"
    head = (
        ["KITSUNE_NO_UNROLL", loop] if len(members) > 1 else ["{", *([f"  const u32 m = {members[0]};"] if member == "m" else [])]
    )
    return [*head, *indented(body), "}"]
