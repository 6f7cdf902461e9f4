"""A laid-out kernel as one short ``.cu`` file, which is meant to be read.

Comes in: ``Layout`` and the kinds of its stages. Goes out: CUDA C++ that includes ``kitsune/kitsune.h`` and nothing else.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda.layout import Layout, entry_vectors
from kitsune_jax.targets.cuda.print_frame import functions
from kitsune_jax.targets.cuda.print_loops import name
from kitsune_jax.targets.cuda.sharing import Kind


def source(at: Layout, found: list[Kind]) -> str:
    """The source of the kernel ``kitsune_region``."""
    head = f"// {at.name}: {told(at)}\n{INCLUDES}constexpr int kLanes = {at.a.lanes};\n{constants(at)}"
    fields = [*params(at), *(f"const void* filled{k};" for k, _ in at.filled)]  # in whose memory a sink finds the identity
    fields += [] if at.fetch is None else [f"{at.fetch.declared};"]
    fields += [f"void* out{k};" for k in range(len(at.program.outputs))]
    fields += ["u8* workspace;", "KITSUNE_DEVICE u8* zeroed() const { return workspace; }"]
    return "\n".join([head, struct("Params", fields), *roles(at, found), "}  // namespace\n", _entry(at)])


INCLUDES = '#include "kitsune/kitsune.h"\n\nnamespace {\n\nusing namespace kitsune;\n\n'


def told(at: Layout) -> str:
    """What a reader wants to know of a part first."""
    p, a = at.program, at.a
    how, stages = "spatial" if a.spatial else "vertical", ", ".join(s.name for s in p.stages)
    return f"{p.rows} rows, {how}, {a.instances(p)} instances of {a.ctas} CTAs, {a.lanes} lanes; stages {stages}"


def constants(at: Layout) -> str:
    sizes = f"constexpr i64 kRows = {at.program.rows};\nconstexpr u32 kTiles = {at.a.tiles(at.program)};\n"
    if not at.batch_tiles:
        return sizes
    rows = at.program.rows // max(1, at.program.batches)
    sizes += f"constexpr u32 kBatchTiles = {at.batch_tiles};\nconstexpr i64 kBatchRows = {rows};\n"
    return f"{sizes}constexpr u32 kTogether = {at.together};\n"


def params(at: Layout) -> list[str]:
    """What a part reads, in the order of its operands."""
    fields = [f"const void* in{k};" for k in at.operands.inputs]
    fields += [f"const u8* weights{k};" for k in range(len(at.operands.groups))]
    fields += ["const float* vectors;"] if at.operands.vectors else []
    return fields + [f"const void* table{k};" for k in range(len(at.operands.tables))]


def struct(name: str, fields: list[str]) -> str:
    return f"struct {name} {{\n" + "".join(f"  {f}\n" for f in fields) + "};\n"


def roles(at: Layout, found: list[Kind]) -> list[str]:
    """The code of a part, whose ``Params`` are known: its barriers (``Header``, ``init``), the roles ``load`` and ``consume``."""
    consumers, loaders = zip(*(functions(at.program, kind) for kind in found), strict=True)
    parts = [_header(at), *(_places(kind) for kind in found if kind.fields), *consumers, *loaders]
    if len(found) < len(at.stages):
        parts.append(_role_table(at, found))
    given, ranks = "const Params& p, Header& header, u8* base, Share share", _ranks(at, found)
    load = [*ranks, *_calls(at, found, "load{s}(p, header, base, share, {slab}{at});")]
    consume = [*ranks, *_calls(at, found, "consume{s}(p, header, base, share, group, instance, {slab}{at});")]
    return [*parts, _init(at), _function(f"load({given})", load), _function(f"consume({given}, u32 group)", consume)]


def _function(title: str, lines: list[str]) -> str:
    return "\n".join([f"KITSUNE_DEVICE void {title} {{", *(f"  {line}" for line in lines), "}\n"])


def _ranks(at: Layout, found: list[Kind]) -> list[str]:
    """This CTA's place in its pipeline, and what it runs."""
    place = f"const u32 instance = share.block / {at.a.ctas}, rank = share.block % {at.a.ctas};"
    return [place, "(void)instance, (void)rank;", *(["const Role role = kRoles[rank];"] if len(found) < len(at.stages) else [])]


def _header(at: Layout) -> str:
    lines = ["struct Header {", "  Mbar resident;", "  u32 flags[4];"]
    if most := _most_staged(at):
        lines.append(f"  Mbar staged[{most}][kLanes][2];")
    if at.a.streamed:
        lines.append(f"  Ring<{at.depth}> weights;")
    for q in at.queue_at:
        lines.append(f"  Ring<{at.program.queues[q].depth}> queue{q}[kLanes];")
    lines += [f"  Ring<{x.depth}> {name(x.ring)}[kLanes];" for x in at.exchanges]
    lines.append("};")
    if at.a.streamed:
        lines.append(f"using Weights = WeightQueue<{at.depth}, {at.slot_bytes}, kLanes, {at.a.cluster}>;")
    return "\n".join(lines) + "\n"


def _most_staged(at: Layout) -> int:
    """Staged arrays of the stage that has most."""
    return max(len(stage.shape.staged) for stage in at.stages)


def _places(kind: Kind) -> str:
    """The table of the constants in which stages of one kind differ."""
    stages = ", ".join(map(str, kind.stages))
    lines = [f"// Where things lie for stages {stages}, which run the same code", f"struct Place{kind.number} {{"]
    lines += [f"  {c.declaration.format(f'{c.name}{c.key}')};" for c in kind.fields]
    lines += ["};", f"KITSUNE_CONSTANT Place{kind.number} kPlaces{kind.number}[] = {{"]
    lines += [f"    {{{', '.join(place)}}}," for place in kind.places]
    return "\n".join([*lines, "};\n"])


def _role_table(at: Layout, found: list[Kind]) -> str:
    """For kernels in which stages share code: what the CTA of each rank runs."""
    lines = [
        "// What each CTA of an instance runs: the functions of a kind of stages, named for the first of them, with a row of its",
        "// places, on a slab.",
        "struct Role {",
        "  u32 kind, place, slab;",
        "};",
        "KITSUNE_CONSTANT Role kRoles[] = {",
    ]
    where = {s: (kind.number, place) for kind in found for place, s in enumerate(kind.stages)}
    for s in range(len(at.stages)):
        kind, place = where[s]
        roles = ", ".join(f"{{{kind}, {place}, {slab}}}" for slab in range(at.a.split[s]))
        lines.append(f"    {roles},  // stage {s}")
    return "\n".join([*lines, "};\n"])


def _init(at: Layout) -> str:
    """Of the barriers, by one thread."""
    lines = ["init_resident(header.resident);", 'name(&header.resident, "resident");']
    for k in range(_most_staged(at)):
        init = f"StagedRows<u8, 1>::init(header.staged[{k}][l])"
        lines += [f"for (int l = 0; l < kLanes; ++l) {init};", f'name(header.staged[{k}], "staged");']
    if at.a.streamed:
        lines += ["Weights::init(header.weights);", 'name(&header.weights, "weights");']
    for q in at.queue_at:
        queue = at.program.queues[q]
        type_ = f"ClusterQueue<{entry_vectors(at.program, at.a, q)}, {queue.depth}>"
        init = f"{type_}::init(header.queue{q}[l], {at.mask(queue.consumers)})"
        lines += [f"for (int l = 0; l < kLanes; ++l) {init};", f'name(header.queue{q}, "queue{q}");']
    for x in at.exchanges:
        type_, ring = f"ClusterQueue<{x.vectors}, {x.depth}>", f"header.{name(x.ring)}"
        init = f"{type_}::init({ring}[l], {(1 << at.a.ctas) - 1}u)"
        lines += [f"for (int l = 0; l < kLanes; ++l) {init};", f'name({ring}, "{name(x.ring)}");']
    return _function("init(Header& header)", lines)


def _entry(at: Layout) -> str:
    sync = "cluster_sync();" if at.a.cluster > 1 else "block_sync();"
    # CTAs beyond those that have tiles only ask for weights.
    share, mine = ("Share::all()", "") if at.grid == at.working else (f"Share::of(0, {at.working}, {at.a.ctas})", "share.is_mine()")
    lines = [
        f"static_assert(sizeof(Header) <= {at.header_bytes});\n",
        f"KITSUNE_KERNEL(kitsune_region, Params, p, {at.a.threads}) {{",
        "  Header& header = shared<Header>();",
        "  u8* const base = reinterpret_cast<u8*>(&header);",
        "  const u32 group = thread_id() / kGroupThreads;",
        f"  const Share share = {share};",
        "  if (thread_id() == 0) {",
        "    init(header);",
        "    fence_mbar_init();",
        "  }",
        f"  {sync}",
        f"  section(share.block % {at.a.ctas}, group);",
        "  if (group == 0) {",
        "    become_loader<kLanes>();",
        f"    if ({mine and f'{mine} && '}fetches()) load(p, header, base, share);",
        "  } else {",
        "    become_consumer<kLanes>();",
        f"    {mine and f'if ({mine}) '}consume(p, header, base, share, group - 1);",
        *([] if at.fetch is None else [f"    {at.fetch.call}"]),
        "  }",
    ]
    if at.a.cluster > 1:
        lines.append("  cluster_sync();  // no CTA leaves while another still writes to its shared memory")
    lines.append("}\n")
    return "\n".join(lines)


def _calls(at: Layout, found: list[Kind], call: str) -> list[str]:
    """The call for each CTA's stage."""
    lines, shares = [], len(found) < len(at.stages)
    for k, kind in enumerate(found):
        first, split = at.a.first_rank(kind.number), at.a.split[kind.number]
        place = f", kPlaces{kind.number}[role.place]" if kind.fields else ""
        slab = "0" if split == 1 else "role.slab" if shares else f"rank - {first}"
        text = call.format(s=kind.number, slab=slab, at=place)
        if len(found) == 1:
            return [text]
        word = "if" if k == 0 else "else if"
        mine = f"role.kind == {kind.number}" if shares else f"rank < {first + split}"
        lines.append(f"{word} ({mine}) {text}" if k + 1 < len(found) else f"else {text}")
    return lines
