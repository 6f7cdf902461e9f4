"""A laid-out kernel as text: one short ``.cu`` file.

Comes in: the generator of ``kernel.py``, with every place decided. Goes out: CUDA C++ that includes ``kitsune/kitsune.h`` and
nothing else. It is meant to be read: the stages' bodies are straight code between named objects.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kitsune_jax.targets.cuda import pointwise, tiles
from kitsune_jax.targets.cuda.arrays import columns_of, lies_together, staged_bytes
from kitsune_jax.targets.cuda.sharing import Kind, StageCode, kinds, places
from kitsune_jax.targets.cuda.values import PanelSum, SinkCode

if TYPE_CHECKING:
    from kitsune_jax.targets.cuda.kernel import _Generator, _Stage


def kernel(g: _Generator) -> str:
    """The source of the kernel ``kitsune_region``."""
    codes = [_code(g, s) for s in range(len(g.stages))]
    found = kinds(codes, g.share)
    parts = [_head(g), _params(g), _header(g)]
    parts += [places(kind) for kind in found if kind.fields]
    parts += [_consumer(g, kind) for kind in found]
    parts += [_loader(kind) for kind in found]
    if len(found) < len(codes):
        parts.append(_role_table(g, found))
    parts += ["}  // namespace\n", _entry(g, found)]
    return "\n".join(parts)


def _code(g: _Generator, s: int) -> StageCode:
    consume, load = _consume(g, s), _load(g, g.stages[s])
    constants = tuple(g.stages[s].body.constants.found.values())
    return StageCode(tuple(consume), tuple(load), g.a.split[s], constants)


def _head(g: _Generator) -> str:
    p, a = g.program, g.a
    how = "spatial" if a.spatial else "vertical"
    stages = ", ".join(s.name for s in p.stages)
    return (
        f"// {g.name}: {p.rows} rows, {how}, {g.instances} instances of {a.ctas} CTAs, {a.lanes} lanes; stages {stages}\n"
        '#include "kitsune/kitsune.h"\n\n'
        "namespace {\n\n"
        "using namespace kitsune;\n\n"
        f"constexpr int kLanes = {a.lanes};\n"
        f"constexpr i64 kRows = {p.rows};\n"
        f"constexpr u32 kTiles = {p.tiles};\n"
    )


def _params(g: _Generator) -> str:
    fields = [f"const void* in{k};" for k in g.inputs]
    fields += [f"const u8* weights{k};" for k in range(len(g.groups))]
    fields += ["const float* vectors;"] if g.vectors.recipes else []
    fields += [f"void* out{k};" for k in range(len(g.program.outputs))]
    fields += ["u8* workspace;"]
    return "struct Params {\n" + "".join(f"  {f}\n" for f in fields) + "};\n"


def _header(g: _Generator) -> str:
    lines = ["struct Header {", "  Mbar resident;", "  u32 flags[4];"]
    if most := _most_staged(g):
        lines.append(f"  Mbar staged[{most}][kLanes][2];")
    if g.streamed:
        lines.append(f"  Ring<{g.depth}> weights;")
    for q in g.queue_at:
        lines.append(f"  Ring<{g.program.queues[q].depth}> queue{q}[kLanes];")
    lines += ["};", f"static_assert(sizeof(Header) <= {g.header_bytes});"]
    if g.streamed:
        lines.append(f"using Weights = WeightQueue<{g.depth}, {g.slot_bytes}, kLanes, {g.a.cluster}>;")
    return "\n".join(lines) + "\n"


# -- consumers


def _consume(g: _Generator, s: int) -> list[str]:
    """What a consumer warpgroup of stage ``s`` does. What may differ between equal stages stands as ``at.<name>``."""
    stage, body = g.stages[s], g.stages[s].body
    inner: list[str] = ["const Lane lane = Lane::mine();", "(void)slab, (void)shared, (void)instance;"]
    if stage.scratch:
        inner.append(f"u8* const scratch = shared + {_scratch_at(stage)} + group * {stage.scratch};")
    if body.scratch_words:
        images = stage.panels_at - _scratch_bytes(body.scratch_words)
        inner.append(f"const Scratch rows = Scratch::at(scratch + {images}, {body.scratch_words});")
    if body.gradients:
        behind = f" + {stage.panels_at}" if stage.panels_at else ""
        inner.append(f"const Panels panels{{shared + {_scratch_at(stage)}{behind}, {stage.scratch}, group}};")
    inner += _queues(g, s)
    inner += _staged(g, s)
    inner += body.setup
    if stage.config.resident:
        if len(body.products.order):
            inner.append("mbar_wait(header.resident, 0);")
    else:
        inner.append(f"StreamedWeights<Weights> weights{{Weights{{&header.weights, shared + {g.header_bytes}}}}};")
    inner.append(f"const u32 worker = {_worker(g)};")
    inner.append(_workers(g))
    # A lane's own tiles are counted without a register for their number.
    more = "n < rounds" if g.uniform else "n * workers + worker < kTiles"
    if g.uniform:
        inner.append("const u32 rounds = rounds_of(workers, kTiles);")
    staged = sorted(stage.config.staged)
    inner += [f"staged{k}.fetch(lane, 0, worker, kRows);" for k in staged]
    inner.append("KITSUNE_NO_UNROLL")
    inner.append(f"for (u32 n = 0; {more}; ++n) {{")
    loop = [
        "const i64 tile = static_cast<i64>(n) * workers + worker;",
        "const i64 first_row = tile * kTileRows + lane.row;",
        "const i64 row[2] = {first_row, first_row + 8};",
        "const bool valid[2] = {row[0] < kRows, row[1] < kRows};",
        "(void)valid;",
        *([f"{_staged_type(g, staged[0])}::turn(1 + group);"] if staged else []),
        *(f"staged{k}.fetch(lane, n + 1, tile + workers, kRows);" for k in staged),
        *(f"staged{k}.wait(n, tile, kRows);" for k in staged),
        *_prefetches(g, s),
        *(["const float* const vectors = opaque(p.vectors);"] if g.vectors.recipes else []),
        *body.prologue,
        *body.lines,
    ]
    inner += ["  " + line for line in loop]
    inner.append("}")
    finish = [*_finish(g, s), *_finish_gradients(g, s)]
    return [*inner, *(["finishing();", *finish] if finish else [])]


def _scratch_at(stage: _Stage) -> str:
    return stage.body.constants.number("scratch", None, stage.scratch_at)


def _most_staged(g: _Generator) -> int:
    """Staged arrays of the stage that has most."""
    return max(len(stage.config.staged) for stage in g.stages)


def _staged_type(g: _Generator, k: int) -> str:
    array = g.program.inputs[k]
    return f"StagedRows<Element<{pointwise.ELEMENT[array.dtype]}>::Bits, {columns_of(array).n}>"


def _staged(g: _Generator, s: int) -> list[str]:
    """The staged arrays of a stage: the lane's buffers one after the other, behind what else the lane has."""
    lines, stage, at = [], g.stages[s], g.stages[s].staged_at
    for index, k in enumerate(sorted(stage.config.staged)):
        source = f"static_cast<const u8*>({stage.body.constants.parameter(f'in{k}')})"
        buffers = f"shared + {_scratch_at(stage)} + group * {stage.scratch} + {at}"
        lines.append(f"const {_staged_type(g, k)} staged{k}{{{source}, {buffers}, header.staged[{index}][group]}};")
        at += staged_bytes(g.program.inputs[k])
    return lines


def _prefetches(g: _Generator, s: int) -> list[str]:
    """The next tile of every input whose rows lie together, but for those that come in bulk anyway."""
    lines = []
    for k in sorted({i["array"] for i in g.program.stages[s].body if i.kind == "load"} - g.stages[s].config.staged):
        array = g.program.inputs[k]
        if lies_together(g.program, array):
            size = columns_of(array).n * pointwise.ITEM_SIZE[array.dtype]
            lines.append(f"prefetch_tile({g.stages[s].body.constants.parameter(f'in{k}')}, next_row, kRows, {size});")
    if not lines:
        return []
    next_row = "(tile + workers) * kTileRows"
    return ["if (lane.thread == 0) {", f"  const i64 next_row = {next_row};", *(f"  {line}" for line in lines), "}"]


def _scratch_bytes(words: int) -> int:
    return -(-tiles.TILE_ROWS * words * 4 // 1024) * 1024


def _workers(g: _Generator) -> str:
    """The warpgroups that share out the tiles: fewer than were planned where the device at hand holds fewer instances."""
    instances = f"grid_size() / {g.a.ctas}" if g.a.spatial else "grid_size()"
    return f"const u32 workers = {instances} * kLanes;"


def _worker(g: _Generator) -> str:
    return "instance * kLanes + group" if g.a.spatial else "block_id() * kLanes + group"


def _queues(g: _Generator, s: int) -> list[str]:
    lines, constants = [], g.stages[s].body.constants
    for q, queue in enumerate(g.program.queues):
        if s != queue.producer and s not in queue.consumers:
            continue
        vectors, depth = g.entry_vectors(q), queue.depth
        if g.a.places[q] == "cluster":
            ring, slots = constants.ring(f"queue{q}", depth), constants.number("slots", q, g.queue_at[q])
            entry = depth * vectors * tiles.GROUP_THREADS * 16
            writers = constants.number("writers", q, _mask(g, [queue.producer]))
            readers = constants.number("readers", q, _mask(g, queue.consumers))
            lines.append(
                f"const ClusterQueue<{vectors}, {depth}> queue{q}{{&{ring}[group], "
                f"reinterpret_cast<U4*>(shared + {slots} + group * {entry}), {writers}, {readers}, 1 + group}};"
            )
        else:
            counters = constants.number("counters", q, g.ring_at[q])
            slots = constants.number("slots", q, g.slots_at[q], "i64")
            length = constants.number("depth", q, depth)
            writers = constants.number("writers", q, g.a.split[queue.producer])
            readers = constants.number("readers", q, sum(g.a.split[c] for c in queue.consumers))
            lines.append(
                f"const auto queue{q} = l2_queue<{vectors}>(p.workspace + {counters}, p.workspace + {slots}, {length}, "
                f"{writers}, {readers}, instance * kLanes + group, 1 + group);"
            )
    return lines


def _mask(g: _Generator, stages: list[int] | tuple[int, ...]) -> int:
    return sum(1 << g.stages[s].first_rank for s in stages)


def _finish(g: _Generator, s: int) -> list[str]:
    """Partial results of the stage's sinks, and their sum in the warpgroup that comes last."""
    sinks = g.stages[s].body.sinks
    if not sinks:
        return []
    constants = g.stages[s].body.constants
    arrived = f"reinterpret_cast<u32*>(p.workspace + {constants.number('arrived', 'sinks', g.counter_at[s])})"
    lines = [f"const Finish finish{{{arrived}, &header.flags[group], workers, worker, 1 + group}};"]
    for sink in sinks:
        partial = f"reinterpret_cast<u32*>({_partial(g, s, sink.sink)})"
        if sink.scalar:
            lines.append(f"store_partial<{sink.how}, {'true' if sink.quad else 'false'}>({partial}, finish, {sink.name});")
        else:
            lines.append(f"store_partial<{sink.how}, {sink.width}>({partial}, finish, lane, {sink.name});")
    lines.append("if (finish.last()) {")
    for sink in sinks:
        lines.append("  " + _combine(g, s, sink))
    lines.append("}")
    return lines


def _finish_gradients(g: _Generator, s: int) -> list[str]:
    """Each lane's rows of the stage's weight gradients: stored, and added up by the lane that comes last of those with the same."""
    gradients = g.stages[s].body.gradients
    if not gradients:
        return []
    part, constants = "instance" if g.a.spatial else "block_id()", g.stages[s].body.constants
    counter = constants.number("arrived", "gradients", g.gradient_counter_at[s])
    arrived = f"reinterpret_cast<u32*>(p.workspace + {counter} + (slab * kLanes + group) * 128)"
    lines = ["{", f"  const Finish finish{{{arrived}, &header.flags[group], workers / kLanes, {part}, 1 + group}};"]
    for gradient in gradients:
        k, words = gradient.sink, g.gradient_words(gradient)
        lines.append(f"  u32* const partial{k} = reinterpret_cast<u32*>({_partial(g, s, k)}) + slab * {g.parts * words};")
        lines.append(f"  gradient{k}.store(partial{k} + static_cast<i64>(finish.worker) * {words}, lane, sum{k});")
        for total in gradient.sums:
            n, words = total.sink, g.parts * total.width
            lines.append(f"  u32* const partial{n} = reinterpret_cast<u32*>({_partial(g, s, n)}) + slab * {words};")
            lines.append(f"  columns{n}.store(partial{n} + finish.worker * {total.width}, sink{n});")
    lines.append("  if (finish.last()) {")
    for gradient in gradients:
        k, shape = gradient.sink, gradient.shape
        out = constants.parameter(f"out{g.program.sinks[k].array}")
        pitch = shape.rows if shape.swapped else shape.columns * g.a.split[s]
        swapped = "true" if shape.swapped else "false"
        template = f"{gradient.element}, {swapped}, {shape.blocks}, {shape.all_blocks}, {shape.width}"
        where = f"{shape.rows}, {shape.columns}, static_cast<int>(slab) * {shape.columns}, {pitch}"
        lines.append(f"    combine_gradient<{template}>({out}, partial{k}, finish.workers, gradient{k}.first, {where});")
        lines += [f"    {_combine_columns(g, s, total)}" for total in gradient.sums]
    return [*lines, "  }", "}"]


def _combine_columns(g: _Generator, s: int, total: PanelSum) -> str:
    array = g.program.sinks[total.sink].array
    out = g.stages[s].body.constants.parameter(f"out{array}")
    if total.slabs and g.a.split[s] > 1:
        size = pointwise.ITEM_SIZE[g.program.outputs[array].dtype]
        out = f"static_cast<u8*>({out}) + slab * {total.columns * size}"
    combine = f"columns{total.sink}.combine<{total.element}>({out}, partial{total.sink}, finish.workers, {total.columns});"
    # Where the stage is split by the other operand, all of its CTAs have the same sums.
    return combine if total.slabs or g.a.split[s] == 1 else f"if (slab == 0) {combine}"


def _partial(g: _Generator, s: int, sink: int) -> str:
    """Where the partial sums of a sink of stage ``s`` begin."""
    return f"p.workspace + {g.stages[s].body.constants.number('partial', sink, g.partial_at[sink], 'i64')}"


def _combine(g: _Generator, s: int, sink: SinkCode) -> str:
    array, columns = g.program.sinks[sink.sink].array, math.prod(g.program.sinks[sink.sink].shape)
    element = pointwise.ELEMENT[g.program.outputs[array].dtype]
    partial, out = f"reinterpret_cast<const u32*>({_partial(g, s, sink.sink)})", g.stages[s].body.constants.parameter(f"out{array}")
    return f"combine<{sink.how}, {sink.type}, {element}>({out}, {partial}, finish, {columns}, {sink.width});"


# -- loader


def _load(g: _Generator, stage: _Stage) -> list[str]:
    """What the loader of a stage does."""
    lines = _load_resident(g, stage) if stage.config.resident else _load_streamed(g, stage)
    return ["(void)slab, (void)p, (void)header, (void)shared;", *lines]


def _load_resident(g: _Generator, stage: _Stage) -> list[str]:
    weights = stage.weights_used()
    if not weights:
        return []
    constants, total = stage.body.constants, sum(g.weights[w].shape.slab_bytes for w in weights)
    lines = [f"expect_resident(header.resident, {total});"]
    for w in weights:
        group, at = g.weight_at[w]
        size, offset = g.weights[w].shape.slab_bytes, stage.config_offset(w)
        slab = f" + slab * {size}" if g.weights[w].shape.split > 1 else ""
        to, source = constants.number("resident", offset, offset), constants.number("weights", w, at)
        lines.append(f"fetch_resident(shared + {to}, p.weights{group} + {source}{slab}, {size}, header.resident);")
    lines.append("finish_resident(header.resident);")
    return lines


def _load_streamed(g: _Generator, stage: _Stage) -> list[str]:
    lines = [
        f"const Weights weights{{&header.weights, shared + {g.header_bytes}}};",
        "Weights::At next;",
        _workers(g),
        "const u32 rounds = rounds_of(workers, kTiles);",
        "KITSUNE_NO_UNROLL",
        "for (u32 round = 0; round < rounds; ++round) {",
    ]
    runs: list[tuple[int, int, int]] = []  # (operand, chunks, bytes of each)
    for f in stage.body.products.order:
        shape = g.weights[f.weight].shape
        group, size = g.groups.index(shape.dtype), shape.chunk_bytes(f.columns)
        if runs and (runs[-1][0], runs[-1][2]) == (group, size):
            runs[-1] = (group, runs[-1][1] + f.k_chunks, size)
        else:
            runs.append((group, f.k_chunks, size))
    lines += [f"  const u8* from{k} = p.weights{k};" for k in sorted({group for group, _, _ in runs})]
    lines += [f"  stream_weights(weights, next, from{group}, {chunks}, {size});" for group, chunks, size in runs]
    lines.append("}")
    return lines


# -- functions


def _consumer(g: _Generator, kind: Kind) -> str:
    many = "Stages" if len(kind.stages) > 1 else "Stage"
    title = ", ".join(g.program.stages[s].name for s in kind.stages)
    arguments = "const Params& p, Header& header, u8* shared, u32 group, u32 instance, u32 slab"
    comment = f"// {many} {', '.join(map(str, kind.stages))}: {title}\n"
    return comment + _function(f"consume{kind.number}", arguments, kind, kind.consume)


def _loader(kind: Kind) -> str:
    return _function(f"load{kind.number}", "const Params& p, Header& header, u8* shared, u32 slab", kind, kind.load)


def _function(name: str, arguments: str, kind: Kind, lines: tuple[str, ...]) -> str:
    at = f", const Place{kind.number}& at" if kind.fields else ""
    body = ["(void)at;", *lines] if at and not any("at." in line for line in lines) else lines
    return "\n".join([f"KITSUNE_DEVICE void {name}({arguments}{at}) {{", *(f"  {line}" for line in body), "}\n"])


# -- entry


def _role_table(g: _Generator, found: list[Kind]) -> str:
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
    for s in range(len(g.stages)):
        kind, place = where[s]
        roles = ", ".join(f"{{{kind}, {place}, {slab}}}" for slab in range(g.a.split[s]))
        lines.append(f"    {roles},  // stage {s}")
    return "\n".join([*lines, "};\n"])


def _entry(g: _Generator, found: list[Kind]) -> str:
    sync = "cluster_sync();" if g.a.cluster > 1 else "block_sync();"
    ctas = g.a.ctas
    lines = [
        f"KITSUNE_KERNEL(kitsune_region, Params, p, {g.threads}) {{",
        "  Header& header = shared<Header>();",
        "  u8* const base = reinterpret_cast<u8*>(&header);",
        "  const u32 group = thread_id() / kGroupThreads;",
        f"  const u32 instance = block_id() / {ctas}, rank = block_id() % {ctas};",
        "  (void)instance, (void)rank;",
        *(["  const Role role = kRoles[rank];"] if len(found) < len(g.stages) else []),
        "  if (thread_id() == 0) {",
        "    init_resident(header.resident);",
        '    name(&header.resident, "resident");',
    ]
    for k in range(_most_staged(g)):
        init = f"StagedRows<u8, 1>::init(header.staged[{k}][l])"
        lines += [f"    for (int l = 0; l < kLanes; ++l) {init};", f'    name(header.staged[{k}], "staged");']
    if g.streamed:
        lines += ["    Weights::init(header.weights);", '    name(&header.weights, "weights");']
    for q in g.queue_at:
        queue = g.program.queues[q]
        init = f"ClusterQueue<{g.entry_vectors(q)}, {queue.depth}>::init(header.queue{q}[l], {_mask(g, queue.consumers)})"
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
    lines += [f"      {line}" for line in _roles(g, found, "load{s}(p, header, base, {slab}{at});")]
    lines += ["    }", "  } else {", "    become_consumer<kLanes>();"]
    lines += [f"    {line}" for line in _roles(g, found, "consume{s}(p, header, base, group - 1, instance, {slab}{at});")]
    lines.append("  }")
    if g.a.cluster > 1:
        lines.append("  cluster_sync();  // no CTA leaves while another still writes to its shared memory")
    lines.append("}\n")
    return "\n".join(lines)


def _roles(g: _Generator, found: list[Kind], call: str) -> list[str]:
    """The call for each CTA's stage."""
    lines, shares = [], len(found) < len(g.stages)
    for k, kind in enumerate(found):
        stage, split = g.stages[kind.number], g.a.split[kind.number]
        at = f", kPlaces{kind.number}[role.place]" if kind.fields else ""
        slab = "0" if split == 1 else "role.slab" if shares else f"rank - {stage.first_rank}"
        text = call.format(s=kind.number, slab=slab, at=at)
        if len(found) == 1:
            return [text]
        word = "if" if k == 0 else "else if"
        mine = f"role.kind == {kind.number}" if shares else f"rank < {stage.first_rank + split}"
        lines.append(f"{word} ({mine}) {text}" if k + 1 < len(found) else f"else {text}")
    return lines
