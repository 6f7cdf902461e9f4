"""Random bits in a Graph: typed keys as arrays of uint32, and the hashes that make bits of them.

Comes in: values of a Graph under construction, with JAX's types of them, or an ``Equation``. Goes out: value ids of results, or the
reason why an equation stays opaque. Invariants: only arguments and results of the Graph and of opaque ops have the type of keys;
inside, a key is its array of uint32, with one dimension more. Both conversions cost nothing, for JAX lowers a key as that array.

JAX's own functions say how keys are split, folded and turned into bits (``_compat.random_jaxpr``); they consist of two primitives,
whose rules are here, and of ops that the table has anyway.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from kitsune_jax import _compat
from kitsune_jax.capture.edit import Builder, Origin, Step, value_of
from kitsune_jax.capture.equation import Equation
from kitsune_jax.ops.spec import np_dtype

# --- keys -------------------------------------------------------------------------------------------------------------------------

UNWRAP, WRAP = "random_unwrap", "random_wrap"  # labels of the ops
_REASON = "a key, which is an array of uint32 inside of pipelines"

# Primitives that move keys, and their parameters that have one entry for each dimension, so also for the words of a key.
_MOVES: dict[str, tuple[str, ...]] = {
    "broadcast_in_dim": ("broadcast_dimensions",),
    "concatenate": (),
    "copy": (),
    "reshape": (),
    "rev": (),
    "select_n": (),
    "slice": ("start_indices", "limit_indices", "strides"),
    "split": (),
    "squeeze": (),
    "stack": (),
    "transpose": ("permutation",),
    "unstack": (),
}


def unwrap(builder: Builder, v: int) -> int:
    """The array of uint32 of keys ``v``; ``v`` itself if it is an array."""
    aval = builder.avals[v]
    if aval is None or not _compat.is_key(aval):
        return v
    step = Step(Origin(), lambda keys: [key_data(keys)])
    return builder.opaque([v], [_compat.physical(aval)], step, _REASON, UNWRAP)[0]


def wrap(builder: Builder, v: int, aval: Any) -> int:
    """The keys of type ``aval`` whose array is ``v``; ``v`` itself if ``aval`` is an array."""
    if not _compat.is_key(aval):
        return v
    made = builder.made_by(v)
    if made is not None and made.label == UNWRAP and builder.avals[made.inputs[0]] == aval:
        return made.inputs[0]
    step = Step(Origin(), lambda x: [typed_key(x, aval)])
    return builder.opaque([v], [aval], step, _REASON, WRAP)[0]


def key_data(x: Any) -> Any:
    """The array (or tracer) of uint32 of keys ``x``; ``x`` itself if it is an array."""
    return jax.random.key_data(x) if x is not None and _compat.is_key(x) else x


def typed_key(x: Any, aval: Any) -> Any:
    """The array (or tracer) ``x`` as keys of type ``aval``; ``x`` itself if ``aval`` is an array."""
    return _compat.wrapped_like(x, aval) if x is not None and _compat.is_key(aval) else x


def params_of(eqn: Any) -> dict[str, Any] | None:
    """The parameters of an equation once keys are arrays; None where an equation on keys does more than move them."""
    avals = [v.aval for v in (*eqn.invars, *eqn.outvars)]
    keys = [aval for aval in avals if _compat.is_key(aval)]
    if not keys:
        return dict(eqn.params)
    name = eqn.primitive.name
    if name not in _MOVES:
        return None
    size = _compat.physical(keys[0]).shape[-1]
    inside, outside = len(eqn.invars[-1].aval.shape), len(eqn.outvars[0].aval.shape)
    last = {"start_indices": 0, "limit_indices": size, "strides": 1, "permutation": inside, "broadcast_dimensions": outside}
    params = dict(eqn.params)
    return params | {k: (*params[k], last[k]) for k in _MOVES[name] if params[k] is not None}


# --- hashes of counters, and the counters -----------------------------------------------------------------------------------------

_KIND = "threefry2x32"
_FEW = 8  # hashes of each key that are made one by one
# XLA makes four elements of each hash, a pipeline one: outside of pipelines the generator stays.
GENERATOR = "rng_bit_generator: the bits of an rbg key that no pipeline makes are left to XLA's generator"
_PHILOX = ("RNG_DEFAULT", "RNG_PHILOX")  # the default is Philox in XLA, on CPUs and GPUs alike


def threefry(e: Equation) -> list[int]:
    """Both words of a hash. Operands of other shapes than the result have dimensions of extent 1, or none."""
    if (hashes := _split_keys(e)) is not None:
        return hashes
    ins = [v if e.shape_of(v) == () else _repeated(e, v) for v in e.ins]
    if all(e.shape_of(v) != e.out_shape for v in ins):
        ins[0] = e.broadcast(ins[0], e.out_shape, ())
    return [e.op(_KIND, *ins, word=word) for word in ("first", "second")]


def _split_keys(e: Equation) -> list[int] | None:
    """Split each of many keys into a few, one new key after the other, by a hash of its number; None for other hashes.

    A hash of one number for all keys is fast code, hashes of rows of three are not; and an op that takes one of the new keys finds
    it.
    """
    if all(eqn.primitive.name != "random_split" for eqn in e.step.origin.eqns):
        return None
    *outer, few = e.out_shape or (0,)
    if not outer or not 1 < few <= _FEW or not _counts_along_last(e, e.ins[3]) or e.builder.constant_of(e.ins[2]) != 0:
        return None
    keys = [v if e.shape_of(v) == () else e.reshape(v, outer) for v in e.ins[:2] if e.shape_of(v) in ((), (*outer, 1))]
    if len(keys) < 2 or all(e.shape_of(v) == () for v in keys):
        return None
    hashes = [[e.op(_KIND, *keys, e.constant(0), e.constant(i), word=word) for i in range(few)] for word in ("first", "second")]
    last = len(outer)
    return [e.op("concatenate", *(e.reshape(x, (*outer, 1)) for x in words), dimension=last) for words in hashes]


def _counts_along_last(e: Equation, v: int) -> bool:
    """Is every element of ``v`` its place in the last dimension, which it has in common with the result?"""
    made, shape = e.builder.made_by(v), e.shape_of(v)
    while made is not None and made.kind in ("reshape", "broadcast_in_dim"):
        v, made = made.inputs[0], e.builder.made_by(made.inputs[0])
    one = shape and shape[-1] == e.out_shape[-1] and all(n == 1 for n in shape[:-1])
    return bool(one) and made is not None and made.kind == "iota" and e.shape_of(v) == e.out_shape[-1:]


def _repeated(e: Equation, v: int) -> int:
    """``v`` in the shape of the result or as a number, by one op where its dimensions of extent 1 were added for that."""
    if (number := e.builder.constant_of(v)) is not None:
        return e.constant(number)
    if e.shape_of(v) == e.out_shape:
        return v
    made, shape = e.builder.made_by(v), e.shape_of(v)
    dims = [d for d, n in enumerate(shape) if n != 1]
    if made is not None and made.kind == "reshape" and e.shape_of(made.inputs[0]) == tuple(shape[d] for d in dims):
        return e.broadcast(made.inputs[0], e.out_shape, dims)
    return e.broadcast(v, e.out_shape, range(len(shape)))


def generated(e: Equation) -> list[int] | str:
    """The next key and the bits of an rbg key: each element a hash of its place (``ops.pointwise``)."""
    dtype, algorithm = value_of(e.aval_of_result(1)).dtype, e.params["algorithm"]
    if getattr(algorithm, "name", str(algorithm)) not in _PHILOX:
        return f"{e.name}: bits of {getattr(algorithm, 'name', algorithm)}, which only XLA's generator makes"
    if e.shape_of(e.ins[0]) != (4,) or dtype not in ("uint8", "uint16", "uint32"):
        return f"{e.name}: {dtype} bits of a key of {e.shape_of(e.ins[0])} words (only of 4 words, up to 32 bits)"
    shape = tuple(e.params["shape"])
    if math.prod(shape) >= 2**32:
        return f"{e.name}: counts beyond 32 bits"
    key = [e.reshape(e.part(e.ins[0], 0, i, 1), ()) for i in range(4)]
    place = _places(e, shape)
    bits = e.builder.add("philox4x32", [*key, place], e.step_in_pipelines(), e.aval_of_result(1), "uint32")
    blocks = e.constant(-(-math.prod(shape) // 4), "uint32")
    low = e.op("add", key[2], blocks, dtype="uint32")
    carry = e.convert(e.op("lt", low, blocks, dtype="bool"), "uint32")
    last = [e.reshape(v, (1,)) for v in (low, e.op("add", key[3], carry, dtype="uint32"))]
    return [e.op("concatenate", e.part(e.ins[0], 0, 0, 2), *last, dimension=0, dtype="uint32"), e.convert(bits, dtype)]


def both_words(e: Equation) -> int | None:
    """The exclusive or of both words of a hash, as in 32 random bits: one op. None for any other operands."""
    made = [e.builder.made_by(v) for v in e.ins]
    first, second = made if len(made) == 2 else (None, None)
    if first is None or second is None or not first.kind == second.kind == _KIND or first.inputs != second.inputs:
        return None
    return e.op(_KIND, *first.inputs, word="xor") if {first["word"], second["word"]} == {"first", "second"} else None


def shifted_out(e: Equation) -> int | None:
    """Zeros, where all bits are shifted out: a seed of 32 bits has no upper word. None for other shifts."""
    x, amount = e.ins
    by = e.builder.values[amount].literal
    if by is None or not by >= 8 * np_dtype(e.out_dtype).itemsize:
        return None
    return e.full(0, e.out_shape) if e.out_shape else e.constant(0)


def all_bits(e: Equation) -> int | None:
    """The operand whose bits the mask keeps all, as those of a seed's lower word. None for any other ``and``."""
    every = -1 if e.out_dtype.startswith("i") else True if e.out_dtype == "bool" else 2 ** (8 * np_dtype(e.out_dtype).itemsize) - 1
    for x, mask in (e.ins, reversed(e.ins)):
        if e.builder.values[mask].literal == every and e.shape_of(x) == e.out_shape:
            return x
    return None


def counts(e: Equation) -> list[int] | str:
    """The upper and the lower word of each element's place in row-major order."""
    shape = e.out_shape
    if math.prod(shape) >= 2**32:
        return f"{e.name}: counts beyond 32 bits"
    return [e.full(0, shape), _places(e, shape)]


def _places(e: Equation, shape: tuple[int, ...]) -> int:
    """Each element's place in row-major order, in 32 bits."""
    low = None
    for d, n in enumerate(shape):
        if n == 1 or 0 in shape:
            continue
        place, stride = e.op("iota", shape=shape, dimension=d, dtype="uint32"), math.prod(shape[d + 1 :])
        part = place if stride == 1 else e.op("mul", place, e.constant(stride, "uint32"), dtype="uint32")
        low = part if low is None else e.op("add", low, part, dtype="uint32")
    return e.full(0, shape, "uint32") if low is None else low
