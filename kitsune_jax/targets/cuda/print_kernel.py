"""A laid-out kernel as one short ``.cu`` file, which is meant to be read.

Comes in: ``Layout`` and the kinds of its stages. Goes out: CUDA C++ that includes ``kitsune/kitsune.h`` and nothing else.
"""

from __future__ import annotations

from kitsune_jax.targets.cuda.layout import Layout, entry_vectors
from kitsune_jax.targets.cuda.print_frame import functions
from kitsune_jax.targets.cuda.sharing import Kind


def source(at: Layout, found: list[Kind]) -> str:
    """The source of the kernel ``kitsune_region``."""
    consumers, loaders = zip(*(functions(at.program, kind) for kind in found), strict=True)
    parts = [_head(at), _params(at), _header(at), *(_places(kind) for kind in found if kind.fields), *consumers, *loaders]
    if len(found) < len(at.stages):
        parts.append(_role_table(at, found))
    return "\n".join([*parts, "}  // namespace\n", _entry(at, found)])


def _head(at: Layout) -> str:
    p, a = at.program, at.a
    how, stages = "spatial" if a.spatial else "vertical", ", ".join(s.name for s in p.stages)
    return (
        f"// {at.name}: {p.rows} rows, {how}, {a.instances(p)} instances of {a.ctas} CTAs, {a.lanes} lanes; stages {stages}\n"
        '#include "kitsune/kitsune.h"\n\n'
        "namespace {\n\n"
        "using namespace kitsune;\n\n"
        f"constexpr int kLanes = {a.lanes};\n"
        f"constexpr i64 kRows = {p.rows};\n"
        f"constexpr u32 kTiles = {p.tiles};\n"
    )


def _params(at: Layout) -> str:
    fields = [f"const void* in{k};" for k in at.operands.inputs]
    fields += [f"const u8* weights{k};" for k in range(len(at.operands.groups))]
    fields += ["const float* vectors;"] if at.operands.vectors else []
    fields += [f"const void* table{k};" for k in range(len(at.operands.tables))]
    fields += [f"const void* filled{k};" for k, _ in at.filled]  # the memory of a result, in which its sink finds the identity
    fields += [f"void* out{k};" for k in range(len(at.program.outputs))]
    fields += ["u8* workspace;"]
    return "struct Params {\n" + "".join(f"  {f}\n" for f in fields) + "};\n"


def _header(at: Layout) -> str:
    lines = ["struct Header {", "  Mbar resident;", "  u32 flags[4];"]
    if most := _most_staged(at):
        lines.append(f"  Mbar staged[{most}][kLanes][2];")
    if at.a.streamed:
        lines.append(f"  Ring<{at.depth}> weights;")
    for q in at.queue_at:
        lines.append(f"  Ring<{at.program.queues[q].depth}> queue{q}[kLanes];")
    lines += ["};", f"static_assert(sizeof(Header) <= {at.header_bytes});"]
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


def _entry(at: Layout, found: list[Kind]) -> str:
    sync = "cluster_sync();" if at.a.cluster > 1 else "block_sync();"
    ctas = at.a.ctas
    lines = [
        f"KITSUNE_KERNEL(kitsune_region, Params, p, {at.a.threads}) {{",
        "  Header& header = shared<Header>();",
        "  u8* const base = reinterpret_cast<u8*>(&header);",
        "  const u32 group = thread_id() / kGroupThreads;",
        f"  const u32 instance = block_id() / {ctas}, rank = block_id() % {ctas};",
        "  (void)instance, (void)rank;",
        *(["  const Role role = kRoles[rank];"] if len(found) < len(at.stages) else []),
        "  if (thread_id() == 0) {",
        "    init_resident(header.resident);",
        '    name(&header.resident, "resident");',
    ]
    for k in range(_most_staged(at)):
        init = f"StagedRows<u8, 1>::init(header.staged[{k}][l])"
        lines += [f"    for (int l = 0; l < kLanes; ++l) {init};", f'    name(header.staged[{k}], "staged");']
    if at.a.streamed:
        lines += ["    Weights::init(header.weights);", '    name(&header.weights, "weights");']
    for q in at.queue_at:
        queue = at.program.queues[q]
        type_ = f"ClusterQueue<{entry_vectors(at.program, at.a, q)}, {queue.depth}>"
        init = f"{type_}::init(header.queue{q}[l], {at.mask(queue.consumers)})"
        lines += [f"    for (int l = 0; l < kLanes; ++l) {init};", f'    name(header.queue{q}, "queue{q}");']
    lines += [
        "    fence_mbar_init();",
        "  }",
        f"  {sync}",
        "  section(rank, group);",
        "  if (group == 0) {",
        "    become_loader<kLanes>();",
        "    if (fetches()) {",
    ]
    lines += [f"      {line}" for line in _roles(at, found, "load{s}(p, header, base, {slab}{at});")]
    lines += ["    }", "  } else {", "    become_consumer<kLanes>();"]
    lines += [f"    {line}" for line in _roles(at, found, "consume{s}(p, header, base, group - 1, instance, {slab}{at});")]
    lines.append("  }")
    if at.a.cluster > 1:
        lines.append("  cluster_sync();  // no CTA leaves while another still writes to its shared memory")
    lines.append("}\n")
    return "\n".join(lines)


def _roles(at: Layout, found: list[Kind], call: str) -> list[str]:
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
