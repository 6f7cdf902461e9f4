"""What a profile of a machine is: measured times of the smallest pieces that CPU plans are made of.

Comes in: nothing. Goes out: ``Profile``. Invariants: it is plain data that can be written as JSON and read back without a loss, and
equal profiles give equal plans; only ``profile.kernels``, ``profile.xla`` and ``profile.timing`` make numbers from a clock.

All numbers are seconds. Those of our own kernels are of **one worker while all workers are busy**; those under ``xla/`` are of XLA
with the whole machine.

=====================================  ============================================================================================
``gemm/<dtype>/<product>/<K>x<N>``     a tile of 96 rows times K x N, packed; product: widened, dots, tiles
``outer/<dtype>/<product>/<K>x<N>``    the weight gradient of a tile of 96 rows, K x N accumulators
``short/<dtype>/<product>``            a tile of 1 row times 256 x 256
``few/<dtype>``                         an element of a weight in the second level that a single row is multiplied by, as it lies
``outer_short/<dtype>/<product>``       the gradient of a tile of 8 rows, 256 x 256 accumulators
``pack/<dtype>/<product>``             an element of a weight into panels; ``pack_t/``: of a transposed one
``activation/<name>/<dtype>``          an element in a product's epilogue, beyond a ReLU
``vector/<opcode>``                    an element of a float32 micro-operation (of hashes: uint32); ``vector64/`` of float64
``load/<dtype>``, ``store/<dtype>``    an element between memory and registers, with its conversion
``fold/<row or column>/<dtype>``       an element of a sum along a row, or over the rows
``fold/short/<dtype>``                 a row of 16 elements; ``load/short/``: 16 elements
``copy/<l1, l2, l3, dram>``            a byte read and a byte written
``touch``, ``touch/huge``              a byte of fresh pages; of huge pages, which a pipeline asks for where its results are large
``take/<l2, l3>/<16, 256>``            a row of so many elements read by a random index, of a table in that cache
``folded/<16, 256>``                   a row added to a random row of a table in the second level
``runs/<16, 256>``                     a row added to those before it with the same index, of which there are eight
``order``                              an index, while the order of a stream is made
``picked``                             an element picked out of a row by an index that all rows share
``dot/<m>x<k>x<n>``                    a product of two small matrices that both belong to one row
``call``, ``call/short``               a call of a pipeline beside its work: with all workers; by the caller alone
``call/layer``                         one more product, with its weight, in a call
``xla/call``, ``xla/kernel``           a jitted function that has nothing to do; one more kernel in it
``xla/call/handed``                    what handing a program to another thread takes, beside the program
``xla/while``                          a step of a loop whose one kernel has one thread; ``/moved``: a byte that it reads or writes;
                                       ``/slices``: a byte of a slice of the loop's arrays; ``/stored``: of one that it stores
``xla/start``                          one of several products of 16 x 64 times 64 x 64, one after the other
``xla/dot/<dtype>/<rows>x<K>x<N>``     ``x @ w``; ``xla/dot_t/``: times w transposed; ``xla/outer/``: ``x.T @ y``
``xla/vector/<dtype>``                 an element of a weight in the L3 that a single row is multiplied by
``xla/batched/<dtype>``                a multiplication and addition of batched products of 16 x 64 times 64 x 16
``xla/loop/<op>/<dtype>``              an element of a fused loop with that operation, in the cache
``xla/chain/<tanh, gelu>/<dtype>``     an element of a loop of six tanhs, or three gelus, each of which waits for the one before it
``xla/beside/tanh/float32``            an element of a loop of six tanhs of which none waits for another
``xla/near/<move or tanh>/<dtype>``    an element of such a loop that one thread runs in its second level
``xla/uneven/tanh/<dtype>``            the same of rows of 16 that the threads cannot share out evenly, with a broadcast operand
``xla/gather/<1, 64>``                 a row of so many elements read by a random index; ``/far``: more, of a table in the L3
``xla/scatter/<1, 64>``                a row added by a random index
``xla/reduce/<which>/<dtype>``         an element of a sum over the trailing dimension (row), the leading one (column), the middle
                                       one (middle) or all; ``xla/squares/``: of a sum of squares; ``xla/absolute/<dtype>``: of a
                                       sum of absolute values over all dimensions
=====================================  ============================================================================================
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping

FORMAT = 4


@dataclasses.dataclass(frozen=True, slots=True)
class Profile:
    """A machine: what it is, and how long things take there.

    ``name``: how ``explain`` and ``KITSUNE_PROFILE`` call it. ``cpu``: the processor, for people. ``isa``: the kernel table.
    ``workers``: threads a plan may count on. ``l1``, ``l2``, ``l3``: bytes of a core's data cache and second level, and of the last
    level. ``numbers``: seconds by name, in ascending order of the names. ``passes``: over all numbers, in which they were measured,
    or 0 where this is not known. ``doubtful``: names of what took other times in all of them, in ascending order, and their
    spreads: how many times as long the second fastest measurement took as the fastest, which is the number.
    """

    name: str
    cpu: str
    isa: str
    workers: int
    l1: int
    l2: int
    l3: int
    numbers: tuple[tuple[str, float], ...]
    passes: int = 0
    doubtful: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        for key, seconds in self.numbers:
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"profile {self.name!r}: {key} is {seconds}, not a positive number of seconds")
        for key, spread in self.doubtful:
            if not (math.isfinite(spread) and spread >= 1):
                raise ValueError(f"profile {self.name!r}: the spread of {key} is {spread}, not a number from 1 on")

    def seconds(self, key: str) -> float:
        """The number called ``key``. Raises ``KeyError``."""
        return table(self)[key]

    def get(self, key: str) -> float | None:
        return table(self).get(key)

    def to_json(self) -> str:
        """As text, one number on a line, so that two profiles can be compared by eye.

        >>> from kitsune_jax.profile.model import Profile
        >>> p = Profile("mine", "a CPU", "avx2", 2, 1 << 15, 1 << 20, 1 << 24, (("touch", 1e-10),))
        >>> Profile.from_json(p.to_json()) == p
        True
        """
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        pairs = {"numbers": dict(self.numbers), "doubtful": dict(self.doubtful)}
        return json.dumps({"format": FORMAT, **fields, **pairs}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Profile:
        """Raises ``ValueError`` for what ``to_json`` did not write."""
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError("it is of another format")
            numbers = numbers_of(data.pop("numbers"))
            profile = Profile(numbers=numbers, doubtful=numbers_of(data.pop("doubtful")), **data)
            sizes = (profile.workers, profile.l1, profile.l2, profile.l3)
            if type(profile.passes) is not int or not all(type(n) is int and n > 0 for n in sizes):
                raise ValueError("cores and caches are positive integers, passes an integer")
            return profile
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a profile: {error!r}") from error


def numbers_of(numbers: Mapping[str, float]) -> tuple[tuple[str, float], ...]:
    """As ``Profile.numbers`` has them, to six digits: more would only look like knowledge."""
    return tuple(sorted((str(k), float(f"{float(v):.6g}")) for k, v in numbers.items()))


@functools.lru_cache(maxsize=64)
def with_least_times_of_xla(profile: Profile) -> Profile:
    """``profile`` with XLA's doubtful numbers as low as their spreads say: a pipeline that wins by such a number may lose."""
    doubtful = dict(profile.doubtful)
    if not any(key.startswith("xla/") for key in doubtful):
        return profile
    least = {key: seconds / doubtful.get(key, 1.0) if key.startswith("xla/") else seconds for key, seconds in profile.numbers}
    return dataclasses.replace(profile, numbers=numbers_of(least))


@functools.lru_cache(maxsize=64)
def table(profile: Profile) -> Mapping[str, float]:
    return dict(profile.numbers)
