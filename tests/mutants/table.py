"""The mutants of each file.

An entry has the tests that should notice, and pairs of what stands in the file once and what to put there instead. A
third part names other tests; a fourth one says why no test can notice the mutant.
"""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One place of the package with other text."""

    file: str
    """Path in the package."""
    old: str
    """Text that the file has once."""
    new: str
    tests: tuple[str, ...]
    """Test files to run, those that notice most mutants first."""
    reason: str = ""
    """Why it survives, if no test can notice it."""


TABLE: dict[str, tuple[str, list[tuple[str, ...]]]] = {
    "subspace/basis.py": (
        "tests/subspace/test_basis.py tests/plugins/test_methods.py",
        [
            ("cumulative = held + values.cumsum(-1)", "cumulative = values.cumsum(-1)"),
            ("(cumulative if below else cumulative - values)", "(cumulative - values if below else cumulative)"),
            ("min(threshold, MAX_THRESHOLD)", "threshold"),
            ("new = new - old @ (old.mT @ new)", "new = new + 0"),
            ("torch.linalg.qr(new).Q", "new"),
            ("return orthogonal * taken", "return orthogonal"),
            ("(alpha + 1) * magnitudes", "alpha * magnitudes"),
            ("alpha * magnitudes + largest", "magnitudes + alpha * largest"),
            ("return (magnitudes > 0).to(magnitudes)", "return torch.ones_like(magnitudes)"),
            ("return inside if self.complement else rows - inside", "return rows - inside"),
            ("removed = compact(basis * importance.sqrt())", "removed = compact(basis * importance)"),
            (
                "remaining = compact(basis * (1 - importance).clamp(min=0).sqrt())",
                "remaining = compact(basis * (1 - importance).clamp(min=0))",
            ),
            ("descending=True, stable=True", "descending=False, stable=True"),
            (">= rank.unsqueeze(-1)", "> rank.unsqueeze(-1)"),
            ("(total - energies.sum(-1, keepdim=True))", "(0 * total)"),
        ],
    ),
    "subspace/inputs.py": (
        "tests/subspace/test_inputs.py tests/subspace/test_basis.py tests/plugins/test_methods.py",
        [
            ("lower[half:, :half] += bottom @ top.T", "lower[half:, :half] -= bottom @ top.T"),
            (
                "total += products(k - 1 + windows, shift) - products(k - 1, shift)",
                "total += products(k - 1 + windows, shift)",
            ),
            ("+= block.permute(2, 3, 0, 1)", "+= block"),
            ("self._lower.tril() + self._lower.tril(-1).mT", "self._lower.tril() + self._lower.tril().mT"),
            ("self._kept_columns().square().sum((-2, -1))", "self._kept_columns().abs().sum((-2, -1))"),
            ("(self._kept_columns().mT @ basis).square().sum(-2)", "(self._kept_columns().mT @ basis).abs().sum(-2)"),
            ("kept = energies > noise", "kept = energies >= 0"),
            ("(energies.sqrt() * kept)", "(energies * kept)"),
            ("columns = columns - basis @ (basis.mT @ columns)", "columns = columns + 0"),
            ("residual = left - (left @ basis) @ basis.mT", "residual = gram"),
            ("return values.square(), vectors", "return values, vectors"),
            (
                "set_fastpath_enabled(False)",
                "set_fastpath_enabled(True)",
                "tests/layers/test_promise.py",
                "torch of today leaves the fast path by itself if modules have hooks; torch 2.4 does not",
            ),
            ("with_ones(columns) if name in ones else columns", "columns"),
            ("hooks[key] = hooks.pop(key)", "pass"),
        ],
    ),
    "subspace/backward.py": (
        "tests/plugins/test_guard.py",
        [
            ("return error <= TOLERANCE * torch.finfo(gradient.dtype).eps * scale", "return True"),
            ("gradient = deltas.mT @ back.project(rows.unsqueeze(0))[0]", "gradient = deltas.mT @ rows"),
            ("gradient[:, :-1], gradient[:, -1], None", "gradient[:, :-1], grad_bias, None"),
            ("grad_x = delta @ weight if", "grad_x = 2 * delta @ weight if"),
            ("rows = F.pad(rows, (0, 1), value=1.0)", "rows = F.pad(rows, (0, 1), value=0.0)"),
        ],
    ),
    "merging/rules.py": (
        "tests/merging/test_rules.py",
        [
            ("return plasticity / (plasticity + stability)  # Eq. 20", "return stability / (plasticity + stability)"),
            ("exact = plasticity - quadratic_form(", "exact = plasticity + quadratic_form("),
            ("min(1.0, max(0.0, exact / (plasticity + stability)))", "exact / (plasticity + stability)"),
            (
                "self.candidate[name].double() - self.base[name].double()",
                "self.candidate[name].double() - self.anchor[name].double()",
            ),
            (
                "self.base[name].double() - self.anchor[name].double()",
                "self.candidate[name].double() - self.anchor[name].double()",
            ),
            (
                "stability = quadratic_form(delta, inputs.precision, delta)",
                "stability = quadratic_form(delta, inputs.fisher, delta)",
            ),
            ("torch.where(step == 0, 0.0, ratio)", "ratio"),
            (
                "torch.where(plasticity + stability == 0, 1 / inputs.t, ratio)",
                "torch.where(plasticity + stability == 0, 0.5, ratio)",
            ),
            (
                "            return 1 / inputs.t\n        if self.exact_anchor",
                "            return 0.5\n        if self.exact_anchor",
            ),
            ("if not any(step.any() for step in delta.values()):", "if False:"),
            ("before = (1 - self.alpha) *", "before = self.alpha *"),
            ("torch.where(now + before == 0, self.alpha,", "torch.where(now + before == 0, 0.0,"),
            (
                '(IMM-mean, Connector)."""\n    return 1 / inputs.t',
                '(IMM-mean, Connector)."""\n    return 1 / (inputs.t + 1)',
            ),
            ("return 0.0 if inputs.projected else 1.0", "return 0.0", "tests/plugins/test_ablation.py"),
            ("(weight * moved[name]).sum()", "(weight * 1.0).sum()"),
            ("return sqrt(sum(", "return (sum("),
        ],
    ),
    "merging/fisher.py": (
        "tests/merging/test_fisher.py",
        [
            ("value=size)  # diagonal of Eq. 19", "value=1)"),
            ("{name: diagonal / batches for", "{name: diagonal for"),
            ("{name: diagonal / samples for", "{name: diagonal for"),
            ("root = (log_p.detach() / 2).exp()", "root = log_p.detach().exp()"),
            ("torch.multinomial(log_p.detach().exp(), 1)", "torch.multinomial(torch.ones_like(log_p), 1)"),
            ("log_p.argmax(-1))", "log_p.argmin(-1))"),
            ('"sum": counted.samples', '"sum": counted.batches'),
            ('"batches": counted.batches / counted.samples', '"batches": 1 / counted.samples'),
            ("(p * (j - mean).square()).sum(-1)", "(p * j.square()).sum(-1)"),
            ("zero_padded(precision.get(name), both) + zero_padded(diagonal, both)", "zero_padded(diagonal, both)"),
            ("result[common] = old[common].to(like)", "result[common] = 1"),
            ("if not are_class_logits(logits, labels):", "if False:"),
            ("((total / size, size) for total, size in totals)", "((total, size) for total, size in totals)"),
            ("if batches == 0:", "if False:"),
            ("if samples == 0:", "if samples < 0:"),
            ('"train" if self.name.startswith("batched") else "eval"', '"eval"'),
            (
                "gradient = gradient.to_dense()  #",
                "gradient = gradient  #",
                "tests/plugins/test_merge.py tests/plugins/test_kinds.py",
            ),
        ],
    ),
    "merging/persample.py": (
        "tests/merging/test_fisher.py",
        [
            ("first = first + other", "first = first + 0"),
            ("total += first.square().sum(0)", "total += first.sum(0).square()"),
            ("if normalisation.couples_samples(module):", "if False:"),
            (
                "        if gradient is not None:\n            raise ValueError(",
                "        if False:\n            raise ValueError(",
            ),
            ("return output.clone()", "return output"),
        ],
    ),
    "layers/linear.py": (
        "tests/layers/test_layers.py tests/merging/test_fisher.py",
        [
            ("gradient.square().mT @ x.square()", "(gradient.mT @ x).square()"),
            ("gradient.square().sum(0) if name", "gradient.sum(0).square() if name"),
            ("if x.dim() != 2:", "if False:"),
        ],
    ),
    "layers/convolution.py": (
        "tests/layers/test_layers.py tests/subspace/test_inputs.py",
        [
            ("stride)[..., ::dilation]", "stride)[..., :kernel]"),
            ("(total // 2, total - total // 2)", "(total - total // 2, total // 2)"),
            ('mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode', 'mode = "constant"'),
            ("if layer.groups > 1 or layer.stride[0] > 1", "if layer.stride[0] > 1"),
            (
                "if layer.groups > 1 or layer.stride[0] > 1 or layer.dilation[0] > 1",
                "if layer.groups > 1 or layer.dilation[0] > 1",
            ),
            (
                "factor[:, inputs.permute(reordered.axes).flatten()]",
                "factor",
                "tests/plugins/test_guard.py tests/plugins/test_projection.py tests/models/test_networks.py",
            ),
        ],
    ),
    "models/multihead.py": (
        "tests/models/test_networks.py",
        [
            ("if self.kaiming and len(new):", "if False:"),
            ("layer.weight[outputs.get(task, 0) :]", "layer.weight"),
            ("if not self.bias:", "if False:"),
        ],
    ),
    "layers/layer.py": (
        "tests/layers/test_layers.py tests/subspace/test_inputs.py tests/merging/test_fisher.py",
        [
            ("(0, 0, 0, 1), value=1.0)", "(0, 0, 0, 1), value=0.0)"),
            ("getattr(type(module), method) is getattr(kind, method) for", "True for"),
            ("always_call=True", "always_call=False"),
            ("return outputs.sum(-1).flatten(1)", "return outputs.mean(-1).flatten(1)"),
        ],
    ),
    "layers/embedding.py": (
        "tests/layers/test_layers.py",
        [
            ("numbers.to(self.weight.dtype).sqrt()", "numbers.to(self.weight.dtype)"),
            ("[:, self.module.padding_idx] = 0", "[:, self.module.padding_idx] += 0"),
        ],
    ),
    "layers/attention.py": (
        "tests/layers/test_layers.py tests/layers/test_promise.py",
        [
            ("overrides[self.bias_name] = torch.zeros_like(self.bias)", "overrides[self.bias_name] = self.bias"),
            ("(query, key, value)[INPUTS.index(self.weight_name[0])]", "query"),
            (
                "yield _as_groups([_as_columns(x) for x in (query, key, value)])",
                "yield _as_groups([_as_columns(x) for x in (query, query, query)])",
            ),
        ],
    ),
    "layers/recurrent.py": (
        "tests/layers/test_layers.py tests/layers/test_promise.py",
        [
            ("f.sigmoid() * states[1] + i.sigmoid() * g.tanh()", "states[1] + i.sigmoid() * g.tanh()"),
            ("new = (1 - z) * new + z * states[0]", "new = z * new + (1 - z) * states[0]"),
            ("(r + hr).sigmoid() * hn", "hn"),
            ("for x in reversed(steps) if reverse else steps:", "for x in steps:"),
            ('seen["out"].reverse()', "pass"),
            ('.tanh() if self.module.mode == "RNN_TANH" else (inputs + hidden).relu()', ".tanh()"),
        ],
    ),
    "layers/transposed.py": (
        "tests/layers/test_layers.py tests/layers/test_promise.py",
        [
            ("by_channel.flip(1)", "by_channel"),
            ("[side, side + extra[axis], *sides]", "[side, side, *sides]"),
            ("return grouped.transpose(1, 2).flatten(2)", "return grouped.transpose(1, 2).flip(1).flatten(2)"),
        ],
    ),
    "layers/normalisation.py": (
        "tests/merging/test_fisher.py",
        [
            ("(module.training or module.running_mean is None)", "module.training"),
            ("module.running_var, eps=module.eps)", "module.running_var, eps=1.0)"),
        ],
    ),
    "layers/model.py": (
        "tests/layers/test_layers.py tests/plugins/test_kinds.py tests/plugins/test_projection.py",
        [
            ("    _refuse_mixed_uses(layers)\n    return layers", "    return layers"),
            ('name == prefix or name.startswith(f"{prefix}.")', "name.startswith(prefix)"),
        ],
    ),
    "plugins/guard.py": (
        "tests/plugins/test_guard.py tests/plugins/test_projection.py",
        [
            ("(step.momentum and not self._momentum_is_projected)", "False"),
            ("gradient.sub_(part, alpha=decay)", "pass"),
            ("return decays == {0} or (len(decays) == 1 and idempotent)", "return True"),
            ("torch.add(start, update, out=parameter)", "pass"),
            (
                "or not self._projects_gradient(step) or _has_hooks(self.parameters):",
                "or not self._projects_gradient(step):",
            ),
            ('if "forward" not in vars(layer):', "if True:"),
            ("projected = done + self.project(rows - done)", "projected = done"),
            ("except RuntimeError as error:", "except KeyError as error:"),
            ("        self._protected_part = []\n", "        pass\n"),
            ("if torch.distributed.is_available() and torch.distributed.is_initialized():", "if False:"),
        ],
    ),
    "plugins/projection.py": (
        "tests/plugins/test_projection.py tests/plugins/test_merge.py tests/plugins/test_owner.py",
        [
            (
                "            if self._suspensions:\n",
                "            if False:\n",
                "tests/plugins/test_guard.py tests/plugins/test_stages.py",
            ),
            ("if not values.isfinite().all():", "if False:", "tests/plugins/test_family.py"),
            ("self._suspensions -= 1", "self._suspensions = 0", "tests/plugins/test_projection.py"),
            ("if len(homes) != 1:", "if False:", "tests/plugins/test_family.py"),
            ("if self.freezes_normalisation:", "if False:"),
            (
                '            if self.bias != "free":\n                biases =',
                "            if True:\n                biases =",
            ),
            ("if not layers.protected:", "if False:"),
            (
                "len(own) == 1 and {weight, *own} <= trainable",
                "len(own) == 1",
                "tests/plugins/test_projection.py tests/plugins/test_methods.py tests/plugins/test_kinds.py",
            ),
            ("strategy.make_optimizer(reset_optimizer_state=True)", "pass"),
        ],
    ),
    "plugins/threshold.py": (
        "tests/plugins/test_methods.py tests/plugins/test_projection.py",
        [
            ("(t - 1) * self.increment", "t * self.increment"),
            ("if not 0 <= threshold <= 1:", "if False:"),
            ("if not 0 <= increment <= 1:", "if False:"),
        ],
    ),
    "plugins/gpm.py": (
        "tests/plugins/test_methods.py",
        [
            ("below=self.reference and first", "below=self.reference"),
        ],
    ),
    "plugins/sgp.py": (
        "tests/plugins/test_methods.py",
        [
            (".clamp(max=1)", ".clamp(max=2)"),
            ('energy_along(memory["basis"]).sqrt()', 'energy_along(memory["basis"])'),
            ("if not alpha >= 0:", "if False:", "tests/plugins/test_methods.py tests/plugins/test_interface.py"),
        ],
    ),
    "plugins/owm.py": (
        "tests/plugins/test_methods.py",
        [
            ("energies / (self.alpha + energies)", "self.alpha / (self.alpha + energies)"),
        ],
    ),
    "plugins/gpcns.py": (
        "tests/plugins/test_gpcns.py tests/plugins/test_methods.py",
        [
            ("if self.experiences > 1:", "if False:"),
            (
                "self._leading(singular_values, self.experiences + 1)",
                "self._leading(singular_values, self.experiences)",
            ),
        ],
    ),
    "plugins/nscl.py": (
        "tests/plugins/test_nscl.py tests/plugins/test_methods.py",
        [
            ("eigenvalues <= self.a * smallest if", "eigenvalues < self.a * smallest if"),
            ("smallest = torch.maximum(smallest, FLOOR * largest)", "pass"),
            ("return lambda rows: project(rows) / norm", "return lambda rows: project(rows) * norm"),
            ("(importance * (parameter - anchor).square()).sum()", "(importance * (parameter - anchor).abs()).sum()"),
            ('torch.lerp(old["anchor"], anchor, share), total', "anchor, total"),
            ("if not a >= 1:", "if False:"),
        ],
    ),
    "plugins/trgp.py": (
        "tests/plugins/test_trgp.py",
        [
            ("term = term + (inside @ scale - inside) @ space.mT", "term = term + (inside @ scale) @ space.mT"),
            ("(inside @ scale[0].mT - inside)", "(inside @ scale[0] - inside)"),
            ("held[task] > self.trust_threshold *", "held[task] < self.trust_threshold *"),
            ("[: self.top_k]", "[:]"),
            ("key=lambda task: -held[task]", "key=lambda task: held[task]"),
            ("if label in self.scales:", "if False:"),
            (
                '        if len(labels) != 1:\n            raise ValueError(\n                f"',
                '        if False:\n            raise ValueError(\n                f"',
            ),
        ],
    ),
    "plugins/merge.py": (
        "tests/plugins/test_merge.py tests/plugins/test_stages.py",
        [
            (
                "self.precision = accumulate(self.precision, self._fisher(strategy, shared, num_workers))",
                "self.precision = self._fisher(strategy, shared, num_workers)",
            ),
            ("            restore(strategy, merged)\n", "            pass\n"),
            ("if not isfinite(mean):", "if False:"),
            ("zero_padded(self.precision.get(name), diagonal) for", "0 * diagonal for"),
            ("self.t + 1, theta_previous, theta_gp", "self.t, theta_previous, theta_gp"),
            (
                "with back_to(strategy, theta_gp), self.free_training",
                "with self.free_training",
                "tests/plugins/test_owner.py",
            ),
            ('if self.buffers == "base":', "if False:", "tests/plugins/test_reference.py tests/plugins/test_merge.py"),
            ("if epochs is not None and epochs < 1:", "if False:"),
            ("if not (rate > 0 and isfinite(rate)):", "if False:", "tests/plugins/test_stages.py"),
            ("self._rate_factor = self.rate", "pass", "tests/plugins/test_stages.py"),
            ("if self.rate == 1:", "if True:", "tests/plugins/test_stages.py"),
            ("second[0] < fmean(first) < fmean(second) / UNSTABLE:", "False:", "tests/plugins/test_stages.py"),
        ],
    ),
    "plugins/connector.py": (
        "tests/plugins/test_connector.py",
        [
            ("share = 1 / (self.t + 1)", "share = 1 / 2"),
            ("restore(strategy, self._start)", "pass"),
            ("self.distillation * F.mse_loss(", "2 * self.distillation * F.mse_loss("),
        ],
    ),
    "strategy/stages.py": ("tests/plugins/test_stages.py", [("        scale(1 / factor)", "        pass")]),
    "strategy/state.py": (
        "tests/plugins/test_owner.py",
        [
            ("if kind != type(self).__name__:", "if False:"),
            ("if version > VERSION:", "if False:"),
            ("if known and not interrupted and self._weights", "if known and self._weights"),
            ("interrupted, self._in_progress = self._in_progress, True", "interrupted, self._in_progress = True, True"),
            ("if not alike and self._owner is not None:", "if False:"),
            ("if not alike:\n", "if False:\n"),
            ("if lacking := [name for name in stored if name in missing]:", "if lacking := []:"),
        ],
    ),
    "strategy/tasks.py": (
        "tests/plugins/test_owner.py tests/plugins/test_hosts.py tests/faults/test_hosts.py",
        [
            ("if earlier > 0 and not self._began and self.is_new():", "if False:"),
            ("if identity in self._trained and not self._continues:", "if False:"),
            ("if identity not in self._in_training:", "if False:"),
            ("if self.needs_loss and isinstance(strategy, ICaRL | SCR):", "if False:"),
            ("if isinstance(plugin, GDumbPlugin | FromScratchTrainingPlugin):", "if False:"),
        ],
    ),
    "strategy/passes.py": (
        "tests/plugins/test_reference.py",
        [
            ("chosen.pop()  #", "chosen.sort()  #"),
            ("if not (train_mode and strategy.model.training):", "if True:"),
        ],
    ),
    "strategy/weights.py": (
        "tests/plugins/test_merge.py tests/plugins/test_connector.py",
        [
            ("        else candidate[name]\n", "        else start\n"),
        ],
    ),
    "strategy/statefile.py": (
        "tests/strategy/test_statefile.py",
        [
            ("if sha256(_with_checksum(data, checksum, _UNSIGNED)).hexdigest() != checksum:", "if False:"),
            ('if metadata["kind"] != kind:', "if False:"),
            ("if len(data) != expected:", "if False:"),
            ("if stride < span:", "if False:"),
        ],
    ),
    "runs/store.py": (
        "tests/runs/test_store.py",
        [
            ('if state.get("key") != self.path.name:', "if False:"),
            ("if path.exists():  # it could", "if False:  # it could"),
            ("delete_checkpoints(before=n - 1)", "delete_checkpoints(before=n)"),
            ('if name != "label"\n', "if True\n"),
            ("if folder.path.is_symlink():", "if False:", "tests/test_hostile_files.py"),
            ("fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB"),
        ],
    ),
    "results/metrics.py": (
        "tests/results/test_metrics.py",
        [
            ("_mean((a[-1] - a.diagonal())[:-1])", "_mean(a[-1] - a.diagonal())"),
            ("_mean(a[t, : t + 1])", "_mean(a[t, :])"),
            ("np.max(a[i:-1, i])", "np.max(a[i:, i])"),
            ('self.compute(record) if record.status == "done" else None', "self.compute(record)"),
        ],
    ),
}


def _mutants() -> list[Mutant]:
    found = []
    for file, (tests, changes) in TABLE.items():
        for old, new, *more in changes:
            own, reason = [*more, "", ""][:2]
            found.append(Mutant(file, old, new, tuple((own or tests).split()), reason))
    return found


MUTANTS = _mutants()
