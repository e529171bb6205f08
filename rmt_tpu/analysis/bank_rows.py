"""How many rows of the bank the kernels of a train step read on average.

A model with attention over depth, or with weighted sums over depth, keeps earlier outputs in a
bank. The bank is allocated for the whole depth, and a layer's kernel skips the rows that are still
empty. The compiled program does not show this, because the number of rows is an operand.
"""

from collections.abc import Sequence
from typing import NamedTuple

from flax import nnx

from rmt_tpu import config as cfg
from rmt_tpu.decoder import Decoder
from rmt_tpu.estimator.hlo import VMEM, Array, Bytes, Executed, Module

# The names of kernels that skip empty rows begin with one of these. Merges read no bank.
_KERNELS, _MERGE = ("depth_attention", "depth_sums"), "_merge"
# The names of kernels whose schedule has the work of every row in a branch of its own. The other
# kernels work on several rows at a time, or in loops that a schedule counts once.
_BY_ROW = "depth_attention_matrices"


class Skipped(NamedTuple):
    """The work that one call of a kernel skips, as an average over all of its calls.

    Attributes:
      bytes: the bytes of operands and results that it does not move.
      schedule: the part of its schedule that it does not execute, between 0 and 1.
    """

    bytes: Bytes = Bytes()
    schedule: float = 0.0


class BankRows(NamedTuple):
    """The size of the bank, and the share of it that is read.

    Attributes:
      allocated: the number of rows of the bank.
      read: the mean number of rows that exist before a group of layers, which is what one pass over
        the bank reads.
    """

    allocated: int
    read: float

    def skipped(self, program: Module, executed: Sequence[Executed]) -> dict[str, Skipped]:
        """Return what each kernel skips, by the name of its instruction.

        Only kernels in the loop over layers are included. The kernel that reads the complete bank
        after the last layer is outside of this loop.
        """
        banks = {ran: arrays for ran in executed if (arrays := self._banks(program, ran))}
        deepest = max([1, *(ran.depth for ran in banks)])
        return {
            ran.instruction.name: self._skipped_by(program, ran, arrays)
            for ran, arrays in banks.items()
            if ran.depth == deepest
        }

    def _skipped_by(self, program: Module, ran: Executed, banks: list[Array]) -> Skipped:
        """Return what a kernel with these banks skips.

        The schedule of a kernel that works row by row is reduced by the share of the bytes that are
        not moved. This is a lower bound, because each row is multiplied for every site.
        """
        share = 1 - self.read / self.allocated
        total = lambda space: sum(x.bytes for x in banks if x.space == space)
        unread = Bytes(*(int(total(space) * share) for space in (0, VMEM)))
        if _BY_ROW not in program.kernel(ran.instruction).name:
            return Skipped(unread)
        moved = program.traffic(ran.computation, ran.instruction).total
        return Skipped(unread, min(unread.total / moved, share))

    def _banks(self, program: Module, ran: Executed) -> list[Array]:
        """Return the operands and results of a kernel that are a bank or the gradient of one.

        Their first axis is the rows. The means of as many sites may have the same shape. Therefore
        a forward pass has at most one bank, and a backward pass three: the bank, the gradient to
        which it adds, and the result.
        """
        kernel = program.kernel(ran.instruction)
        if kernel is None or not kernel.name.startswith(_KERNELS) or _MERGE in kernel.name:
            return []
        scope = program.computations[ran.computation]
        # A kernel may get the same bank several times, once for each block that it reads.
        operands = [scope[x].arrays for x in dict.fromkeys(ran.instruction.operands) if x in scope]
        arrays = [array for of in (*operands, ran.instruction.arrays) for array in of]
        banks = [x for x in arrays if x.shape[:1] == (self.allocated,) and len(x.shape) > 2]
        return banks[: 3 if "backward" in kernel.name else 1]


def bank_rows(config: cfg.ModelConfig) -> BankRows | None:
    """Return how many rows of its bank a model reads on average; None for a model without one."""
    if not config.mixer.banked:
        return None
    mixer = nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).mixer
    read, sublayers = [], 0
    for stack in config.stacks:
        period = len(stack.cores)
        group = mixer.grouping(sublayers, period, stack.repeat).layers
        starts = range(0, stack.repeat, group)
        read += [mixer.first_row(sublayers + start * period) for start in starts]
        sublayers += stack.num_sublayers
    return BankRows(mixer.num_rows, sum(read) / len(read))
