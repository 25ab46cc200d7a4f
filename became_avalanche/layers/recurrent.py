"""Recurrent layers: the weights of inputs and of hidden states, step by step."""

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

    The inputs of a hidden state's weight are the states before each step, which the module does not show: they are
    computed again, step by step, as far as the layer. All gates see the same input, so there is one group.
    """

    module: nn.RNNBase
    tells_samples_apart = False

    def __init__(self, module: nn.RNNBase, kind: str, depth: int, reverse: bool) -> None:
        """Init.

        :param module: the module.
        :param kind: "ih" for the weight of inputs, "hh" of hidden states, "hr" of the projection of an LSTM's state.
        :param depth: which of the stacked layers.
        :param reverse: whether it is the one that runs backwards.
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
        """The input of each step, (batch, size) with the longest sequences first, and the states at the start."""
        module = self.module
        if isinstance(input, PackedSequence):
            steps = list(torch.split(input.data, input.batch_sizes.tolist()))
            order = input.sorted_indices
        else:
            if input.dim() == 2:  # a single sequence without a batch axis
                input = input.unsqueeze(0 if module.batch_first else 1)
                hx = _each(hx, lambda state: state.unsqueeze(1))
            steps, order = list(input.unbind(1 if module.batch_first else 0)), None
        if hx is None:
            sizes = [module.proj_size or module.hidden_size, module.hidden_size]
            places = module.num_layers * (1 + module.bidirectional), len(steps[0])
            starts = [steps[0].new_zeros(*places, size) for size in sizes]
        else:
            starts = [state if order is None else state[:, order] for state in _each(hx, lambda state: state)]
        return steps, starts

    def _run(
        self, steps: Sequence[Tensor], starts: Sequence[Tensor], depth: int, reverse: bool
    ) -> dict[str, list[Tensor]]:
        """What each weight of a layer sees, and its outputs ("out"), at each step."""
        place = depth * (1 + self.module.bidirectional) + reverse
        first = [state[place] for state in starts]
        states = [state[:0] for state in first]
        seen: dict[str, list[Tensor]] = {"ih": [], "hh": [], "hr": [], "out": []}
        for x in reversed(steps) if reverse else steps:
            # sequences that have ended are left out; those that begin now, or later on the way back, are at the start
            states = [
                torch.cat([state[: len(x)], start[len(state) : len(x)]])
                for state, start in zip(states, first, strict=True)
            ]
            seen["ih"].append(x)
            seen["hh"].append(states[0])
            states, cell = self._step(x, states, f"l{depth}{'_reverse' if reverse else ''}")
            seen["hr"].append(cell)
            seen["out"].append(states[0])
        if reverse:
            seen["out"].reverse()
        return seen

    def _step(self, x: Tensor, states: Sequence[Tensor], suffix: str) -> tuple[list[Tensor], Tensor]:
        """The states after a step, and an LSTM's state before its projection."""
        module: Any = self.module
        weights: dict[str, Any] = dict(zip(module._flat_weights_names, module._flat_weights, strict=True))
        inputs = F.linear(x, weights[f"weight_ih_{suffix}"], weights.get(f"bias_ih_{suffix}"))
        hidden = F.linear(states[0], weights[f"weight_hh_{suffix}"], weights.get(f"bias_hh_{suffix}"))
        if isinstance(self.module, nn.LSTM):
            i, f, g, o = (inputs + hidden).chunk(4, dim=-1)
            memory = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
            shown = o.sigmoid() * memory.tanh()
            project = weights.get(f"weight_hr_{suffix}")
            return [shown if project is None else F.linear(shown, project), memory], shown
        if isinstance(self.module, nn.GRU):
            (r, z, n), (hr, hz, hn) = inputs.chunk(3, dim=-1), hidden.chunk(3, dim=-1)
            z = (z + hz).sigmoid()
            new = (n + (r + hr).sigmoid() * hn).tanh()
            new = (1 - z) * new + z * states[0]
        else:
            new = (inputs + hidden).tanh() if self.module.mode == "RNN_TANH" else (inputs + hidden).relu()
        return [new, *states[1:]], new

    def _put(self, name: str, tensor: Any) -> Any:
        """Recurrent modules compute with a list of their weights."""
        weights: list[Any] = self.module._flat_weights
        index = self.module._flat_weights_names.index(name)
        before, weights[index] = weights[index], tensor
        return before


class CellLayer(Layer):
    """A weight of ``nn.LSTMCell``, ``nn.GRUCell`` or ``nn.RNNCell``, or of a subclass that keeps the ``forward``."""

    module: nn.RNNCellBase
    tells_samples_apart = False

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
            state = _each(hx, lambda state: state)[0]
            yield state.reshape(1, -1, state.shape[-1]).mT


def _each(states: Any, change: Any) -> list[Tensor] | Any:
    """``change`` of the hidden state, and of an LSTM's memory if there is one."""
    if states is None:
        return None
    return [change(state) for state in ([states] if isinstance(states, Tensor) else states)]
