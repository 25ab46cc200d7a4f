"""Recurrent layers: the inputs and hidden states of each step are columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from became_avalanche.layers.layer import Layer, keeps_forward


class RecurrentLayer(Layer):
    """A weight of ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``, or of a subclass that keeps the ``forward``.

    The inputs of a hidden-state weight are the states before each step. The module does not return them, so they are
    recomputed step by step, up to this layer of the stack. All gates see the same input, so there is one group.
    """

    module: nn.RNNBase
    has_per_sample_gradients = False

    def __init__(self, module: nn.RNNBase, kind: str, depth: int, reverse: bool) -> None:
        """Init.

        :param module: the module.
        :param kind: "ih" for the input weight, "hh" for the hidden-state weight, "hr" for the projection of an LSTM
            (``proj_size``).
        :param depth: index of the layer in the stack.
        :param reverse: whether it is the layer that runs backwards in time.
        """
        suffix = f"{kind}_l{depth}{'_reverse' if reverse else ''}"
        super().__init__(module, f"weight_{suffix}", f"bias_{suffix}")
        self._kind, self._depth, self._reverse = kind, depth, reverse

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not any(keeps_forward(module, kind) for kind in (nn.LSTM, nn.GRU, nn.RNN)):
            return []
        assert isinstance(module, nn.RNNBase)
        return [
            cls(module, kind, depth, reverse)
            for depth in range(module.num_layers)
            for reverse in (False, True)[: 1 + module.bidirectional]
            for kind in ("ih", "hh", "hr")[: 3 if module.proj_size else 2]
        ]

    def columns(self, input: Tensor | PackedSequence, hx: Any = None) -> Iterator[Tensor]:
        steps, starts = self._steps(input, hx)
        for depth in range(self._depth + 1):
            outputs = []
            for reverse in (False, True)[: 1 + self.module.bidirectional]:
                seen = self._run(steps, starts, depth, reverse)
                if (depth, reverse) == (self._depth, self._reverse):
                    yield torch.cat(seen[self._kind]).unsqueeze(0).mT
                    return
                outputs.append(seen["out"])
            steps = [torch.cat(step, dim=-1) for step in zip(*outputs, strict=True)]

    def _steps(self, input: Tensor | PackedSequence, hx: Any) -> tuple[list[Tensor], list[Tensor]]:
        """Return the input of each step, (batch, size) with the longest sequences first, and the initial states."""
        module = self.module
        if isinstance(input, PackedSequence):
            steps = list(torch.split(input.data, input.batch_sizes.tolist()))
            order = input.sorted_indices
        else:
            if input.dim() == 2:  # a single sequence without a batch axis
                input = input.unsqueeze(0 if module.batch_first else 1)
                hx = _map_states(hx, lambda state: state.unsqueeze(1))
            steps, order = list(input.unbind(1 if module.batch_first else 0)), None
        if hx is None:
            sizes = [module.proj_size or module.hidden_size, module.hidden_size]
            places = module.num_layers * (1 + module.bidirectional), len(steps[0])
            starts = [steps[0].new_zeros(*places, size) for size in sizes]
        else:
            starts = [state if order is None else state[:, order] for state in _map_states(hx, lambda state: state)]
        return steps, starts

    def _run(
        self, steps: Sequence[Tensor], starts: Sequence[Tensor], depth: int, reverse: bool
    ) -> dict[str, list[Tensor]]:
        """Return the inputs of each weight of a layer ("ih", "hh", "hr") and its outputs ("out"), step by step."""
        place = depth * (1 + self.module.bidirectional) + reverse
        first = [state[place] for state in starts]
        states = [state[:0] for state in first]
        seen: dict[str, list[Tensor]] = {"ih": [], "hh": [], "hr": [], "out": []}
        for x in reversed(steps) if reverse else steps:
            # drop sequences that have ended; those that begin at this step (possible in reverse) get initial states
            states = [
                torch.cat([state[: len(x)], start[len(state) : len(x)]])
                for state, start in zip(states, first, strict=True)
            ]
            seen["ih"].append(x)
            seen["hh"].append(states[0])
            states, unprojected = self._step(x, states, f"l{depth}{'_reverse' if reverse else ''}")
            seen["hr"].append(unprojected)
            seen["out"].append(states[0])
        if reverse:
            seen["out"].reverse()
        return seen

    def _step(self, x: Tensor, states: Sequence[Tensor], suffix: str) -> tuple[list[Tensor], Tensor]:
        """Return the states after a step, and the hidden state before an LSTM projects it (``proj_size``)."""
        module: Any = self.module
        weights: dict[str, Any] = dict(zip(module._flat_weights_names, module._flat_weights, strict=True))
        inputs = F.linear(x, weights[f"weight_ih_{suffix}"], weights.get(f"bias_ih_{suffix}"))
        hidden = F.linear(states[0], weights[f"weight_hh_{suffix}"], weights.get(f"bias_hh_{suffix}"))
        if isinstance(self.module, nn.LSTM):
            i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
            cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
            unprojected = o.sigmoid() * cell.tanh()
            project = weights.get(f"weight_hr_{suffix}")
            return [unprojected if project is None else F.linear(unprojected, project), cell], unprojected
        if isinstance(self.module, nn.GRU):
            (r, z, n), (hr, hz, hn) = inputs.chunk(3, dim=-1), hidden.chunk(3, dim=-1)
            z = (z + hz).sigmoid()
            new = (n + (r + hr).sigmoid() * hn).tanh()
            new = (1 - z) * new + z * states[0]
        else:
            new = (inputs + hidden).tanh() if self.module.mode == "RNN_TANH" else (inputs + hidden).relu()
        return [new, *states[1:]], new

    def _swap(self, name: str, tensor: Any) -> Any:
        """Recurrent modules read their weights from a list."""
        weights: list[Any] = self.module._flat_weights
        index = self.module._flat_weights_names.index(name)
        before, weights[index] = weights[index], tensor
        return before


class CellLayer(Layer):
    """A weight of ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``, or of a subclass that keeps the ``forward``."""

    module: nn.RNNCellBase
    has_per_sample_gradients = False

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not any(keeps_forward(module, kind) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)):
            return []
        return [cls(module, "weight_ih", "bias_ih"), cls(module, "weight_hh", "bias_hh")]

    def columns(self, input: Tensor, hx: Any = None) -> Iterator[Tensor]:
        if self.weight_name == "weight_ih":
            yield input.reshape(1, -1, input.shape[-1]).mT
        elif hx is None:
            yield input.new_zeros(1, self.module.hidden_size, input[..., 0].numel())
        else:
            state = _map_states(hx, lambda state: state)[0]
            yield state.reshape(1, -1, state.shape[-1]).mT


def _map_states(states: Any, change: Any) -> list[Tensor] | Any:
    """Apply ``change`` to the hidden state and, for an LSTM, to the cell state. None stays None."""
    if states is None:
        return None
    return [change(state) for state in ([states] if isinstance(states, Tensor) else states)]
