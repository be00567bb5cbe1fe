"""Mutants of the core: a file, a text that occurs in it once, and what a mistake would have put there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "dcil"
KERNEL = "tests/test_views.py tests/test_schedule.py tests/test_selection.py tests/test_method.py tests/test_net.py"
METHODS = "tests/methods/test_by_hand.py tests/test_example.py"
RIVALS = "tests/methods/test_rivals.py"
RUNS = "tests/runs/test_durability.py tests/train/test_random_streams.py"
RUNS += " tests/runs/test_file_lock.py"
PATHS = "tests/test_net.py tests/test_batched_views.py tests/test_mutual_kl.py tests/test_bindings.py"
CHECKPOINT = "tests/runs/test_checkpoint.py::test_any_flipped_bit_is_noticed"
CHECKPOINT += " tests/runs/test_checkpoint.py::test_a_checkpoint_of_another_run_is_named_with_the_setting"
DATA = "tests/data/test_data.py"
WITHIN = " ".join(
    f"tests/train/test_within_epochs.py::test_{name}"
    for name in (
        "resumed_within_epochs_the_run_is_the_same[dcil]",
        "dropout_moments_and_sequences_go_on_within_an_epoch",
        "seconds_within_an_epoch_are_those_of_all_its_parts",
    )
)
BROKEN = "tests/methods/test_contract.py -k a_broken_batch_or_weight"
MIN_KEPT = "tests/test_wiring.py::test_min_kept_keeps_some_of_every_layer_and_the_count_exact"


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the tests that have to notice it. ``survives`` says why none can, where none can."""

    file: str
    old: str
    new: str
    tests: str = f"{KERNEL} {METHODS}"
    survives: str = ""

    def __str__(self) -> str:
        return f"{self.file}: {self.old.strip()!r} -> {self.new.strip()!r}"

    def apply(self, src: Path) -> str:
        """Put the mistake into the file below ``src``; return what was there."""
        path = src / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.file} must hold {self.old!r} once, has it {text.count(self.old)} times: mend MUTANTS"
            )
        path.write_text(text.replace(self.old, self.new))
        return text


M = Mutant
MUTANTS = [
    # views: which weights a gradient reaches
    M("views.py", "return torch.where(m, w.detach(), w)", "return torch.where(m, w, w.detach())"),
    M("views.py", "return torch.where(m, w.detach(), w)", "return torch.where(m, w, w)"),
    M("views.py", "return w + (w * m - w).detach()", "return w + (w * m - w)"),
    M("views.py", "return w + (w * m - w).detach()", "return w * m"),
    M("views.py", "    return w * m\n", "    return w * ~m\n"),
    # schedule: when, and how sparse
    M("schedule.py", "time.first <= step <= time.last", "time.first < step <= time.last"),
    M("schedule.py", "time.first <= step <= time.last", "time.first <= step < time.last"),
    M("schedule.py", "step % time.every == 0", "step % time.every == 1"),
    M("schedule.py", "        if step >= steps:\n", "        if step > steps:\n"),
    M("schedule.py", "(left * left * left)", "(left * left)"),
    M("schedule.py", "step // period * period - begin", "step - begin"),
    M("schedule.py", "if step >= time.first else time.initial", "if step > time.first else time.initial"),
    M("schedule.py", "sum(step >= at for at in time.extra)", "sum(step > at for at in time.extra)"),
    M("schedule.py", "** (done / rounds))", "** (1 / rounds))"),
    M("schedule.py", 'random.Random(f"{time.seed} {step}")', 'random.Random(f"{time.seed}")'),
    M("schedule.py", "2 ** sum(", "2 * sum("),
    # selection: exactly so many, the largest, the first of equal ones
    M("selection.py", "above = scores > threshold", "above = scores >= threshold"),
    M("selection.py", "tied.cumsum(0) <= room", "tied.cumsum(0) < room"),
    M("selection.py", "room = scores.numel() - pruned - above.count_nonzero()", "room = scores.numel() - pruned"),
    M("selection.py", 'device.type == "cpu" and room == 0', 'device.type == "cpu"'),
    M(
        "selection.py",
        "left = k - int((scores < low).count_nonzero())",
        "left = k - int((scores <= low).count_nonzero())",
    ),
    M(
        "selection.py",
        "threshold = kth_smallest(scores, pruned)",
        "threshold = kth_smallest(scores, max(1, pruned - 1))",
    ),
    M("selection.py", "min(int(sparsity * sum(sizes)), sum(limits))", "min(round(sparsity * sum(sizes)), sum(limits))"),
    M("selection.py", "min(size - min_kept, most_pruned(size))", "most_pruned(size)", MIN_KEPT),
    M("selection.py", "below = counts.cumsum(0) < left", "below = counts.cumsum(0) <= left"),
    M(
        "selection.py",
        "(after & ~before).count_nonzero(), (before & ~after).count_nonzero()",
        "(before & ~after).count_nonzero(), (after & ~before).count_nonzero()",
    ),
    M("selection.py", "torch.where(candidates, wide(scores), -1.0)", "torch.where(candidates, wide(scores), 0.0)"),
    M("selection.py", "    scores = without_nan(scores)\n    threshold", "    threshold"),
    # method: times and the mask update
    M("method.py", "return max(1, round(self.ramp * self.steps))", "return max(1, round(self.ramp * self.steps)) + 1"),
    M("method.py", "last = self.target_step, self.steps - 1", "last = self.target_step, self.steps"),
    M("method.py", "extra=() if next_regular <= last else (target,)", "extra=()"),
    M("method.py", "hold=1 if self.smooth else self.epoch_steps", "hold=self.epoch_steps if self.smooth else 1"),
    M("method.py", "before = [layer.mask.clone()", "before = [layer.mask"),
    M("method.py", "layers, self.min_kept, most)", "layers, 0, most)", MIN_KEPT),
    M("method.py", "self.criterion.observe(context.layers, context.state)", "pass"),
    M("method.py", "torch.stack(list(losses.values())).sum()", "torch.stack(list(losses.values())).mean()"),
    # net: the counted step, the count of kept weights, what is handed back
    M("net.py", "self._steps_done += 1", "self._steps_done += 2"),
    M("net.py", "self.hooks.after_step(context)\n", "pass\n"),
    M("net.py", "update.changes[0] - update.changes[1]", "update.changes[1] - update.changes[0]"),
    M("net.py", "masked_fill(~whole(layer.mask), 0)", "masked_fill(whole(layer.mask), 0)"),
    M("net.py", "return 1 - int(self.kept.sum()) /", "return int(self.kept.sum()) /"),
    # NaN, and magnitudes whose squares are no numbers
    M("net.py", "self._finite.before_update(self.method, context)", "pass", BROKEN),
    M("net.py", "self._finite.weights(self.layers, self._steps_done)", "pass", BROKEN),
    M("weight.py", "wide(self.weight.detach()).abs()", "wide(self.weight.detach()).square()"),
    M("selection.py", "    scores = without_nan(scores)\n", ""),
    M("granularity.py", "(rows / largest).pow(power)", "rows.pow(power)"),
    M("net.py", "identity.pack(self.method, self._steps_done)", "identity.pack(self.method, 0)"),
    M("net.py", "if self.method.due(self._steps_done) else None", "if self.method.due(self._steps_done - 1) else None"),
    M(
        "net.py",
        "self.method.loss(outputs, target, objective, self._loss_step)",
        "self.method.loss(outputs, target, objective, 0)",
    ),
    M(
        "net.py",
        "torch.ones_like(self.model.get_parameter(name), dtype=torch.bool)",
        "self.model.get_parameter(name) > 0",
    ),
    # paths and distillation
    M("paths.py", 'if not self.training and "pruned" in paths:', "if False:"),
    M("bindings.py", "{name: parameter.detach() for name", "{name: parameter for name", PATHS),
    M("bindings.py", "table[key].clone() for name", "table[key] for name", PATHS),
    M("batched_views.py", "return torch.where(mask, p, s, out=", "return torch.where(mask, s, p, out=", PATHS),
    M("batched_views.py", "torch.where(mask, grad, 0) if view is views.kept", "grad if view is views.kept", PATHS),
    M("mutual_kl.py", "return -back, back,", "return back, -back,", PATHS),
    M("mutual_kl.py", "return total * temperature**2", "return total * temperature", PATHS),
    M("counted.py", "or key != self._loss_key:", "and key != self._loss_key:", PATHS),
    M(
        "distillation.py",
        "student, teacher = exact(student), exact(teacher.detach())",
        "student, teacher = exact(student), exact(teacher)",
    ),
    M(
        "distillation.py",
        "return temperature**2 * reduce(terms, counted, reduction)\n\n\ndef distill_sigmoid",
        "return temperature * reduce(terms, counted, reduction)\n\n\ndef distill_sigmoid",
    ),
    M(
        "distillation.py",
        "return distance(p, s) + distance(s, p)",
        "return distance(p, s) + distance(p, s)",
    ),
    M("methods/dcil.py", "kl = weight * distill_both_ways(", "kl = distill_both_ways("),
    M("distillation.py", "F.log_softmax(student / temperature, dim=dim)", "F.log_softmax(student, dim=dim)"),
    M("methods/dcil.py", "step >= round(self.warmup * self.steps)", "step > round(self.warmup * self.steps)"),
    # drop and grow, momentum
    # rivals: thresholds, phases, second sets
    M("schedule.py", "if done % 2 else 0.0 if done", "if done % 2 else time.sparsity if done", RIVALS),
    M("methods/thresholded.py", "return torch.where(layer.mask, seen, 0)", "return seen", RIVALS),
    M("methods/thresholded.py", "torch.stack(pruned).amax()", "torch.stack(pruned).amin()", RIVALS),
    M("methods/thresholded.py", "(*regular.extra, self.steps)", "regular.extra", RIVALS),
    M("methods/st3.py", ".clamp_min(0)\n", "\n", RIVALS),
    M("methods/st3.py", "1 / math.sqrt(", "math.sqrt(", RIVALS),
    M("methods/feather.py", "self.sparsity > 0.95", "self.sparsity >= 0.95", RIVALS),
    M("methods/feather.py", "torch.where(threshold > 0,", "torch.where(threshold >= 0,", RIVALS),
    M("methods/acdc.py", "            reset_state(context.optimizer, context.model)\n", "            pass\n", RIVALS),
    M("methods/acdc.py", "min(max(1, round(", "min(max(0, round(", RIVALS),
    M("methods/topkast.py", "] & ~layer.mask\n", "]\n", RIVALS),
    M("methods/topkast.py", "self.penalty / (1 - self.sparsity)", "self.penalty / self.sparsity", RIVALS),
    M("methods/granet.py", "largest_among(~stay,", "largest_among(~layer.mask,", RIVALS),
    M(
        "methods/granet.py",
        "torch.where(layer.mask, self.criterion.score(layer, state), -1.0)",
        "self.criterion.score(layer, state)",
        RIVALS,
    ),
    M("methods/srste.py", "* ~layer.mask", "* layer.mask", RIVALS),
    M("criteria.py", "squares / squares.cumsum(0)", "squares / squares.sum()", RIVALS),
    M("methods/drop_and_grow.py", "self.seed * 1_000_003 + context.step", "self.seed * 1_000_003"),
    M("methods/drop_and_grow.py", "layer.mask.logical_or_(new)", "layer.mask.logical_and_(new)"),
    M("optimizer_state.py", "value.shape == weight.shape", "value.shape != weight.shape"),
    # runs: what is on disk after a kill, and that an epoch depends on nothing but its seed and number
    M("runs/atomic.py", "        sync_file(draft)\n", "", RUNS),
    M("runs/atomic.py", "os.replace(draft, path)", "path.write_bytes(draft.read_bytes())", RUNS),
    M("runs/atomic.py", "        sync_folder(path.parent)\n", "", RUNS),
    M("runs/folder.py", "os.fsync(opened.fileno())", "pass", RUNS),
    M("runs/folder.py", 'with exclusive(self.path / ".lock", busy):', "if True:", RUNS),
    M("runs/file_lock.py", "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass", RUNS),
    M("runs/file_lock.py", "if names(file, lock):\n            if locked:", "if True:\n            if locked:", RUNS),
    M("runs/checkpoint.py", "            self.load_optimizer(optimizer)\n", "            pass\n", RUNS),
    M("runs/checkpoint.py", 'raise ValueError("its checksum is wrong")', "pass", CHECKPOINT),
    M("runs/checkpoint.py", 'check_settings(file, json.loads(self.notes["config"]), config)', "pass", CHECKPOINT),
    M("train/loop.py", "            self.folder.append(row)\n", "", RUNS),
    M(
        "train/loop.py",
        "self.folder.append(row)\n",
        "self.save(epoch + 1, hooks)\n            self.folder.append(row)\n",
        RUNS,
    ),
    M("train/loop.py", "        folder.rewind_metrics(start.epoch)\n", "", RUNS),
    M("train/loop.py", "range(start.epoch, end)", "range(start.epoch + 1, end)", RUNS),
    M("train/trainer.py", "reseed(seed, epoch + 1, start.batch)", "reseed(seed, 1, start.batch)", RUNS),
    M("train/trainer.py", "SeedSequence((seed, stream, step))", "SeedSequence((seed,))", RUNS),
    # within an epoch
    M("train/trainer.py", "start.batch, start.sums)", "start.batch)", WITHIN),
    M("train/trainer.py", "(*start.updates, *map(as_row, updates))],", "map(as_row, updates)],", WITHIN),
    M("train/trainer.py", "reseed(seed, epoch + 1, batch)", "pass", WITHIN),
    M("train/trainer.py", "time.perf_counter() - start.seconds", "time.perf_counter()", WITHIN),
    M("data/batches.py", "range(start * self.batch, images", "range(0, images", WITHIN),
    M("engine/eager.py", "self.loader.train(epoch, start), start)", "self.loader.train(epoch, start))", WITHIN),
    M("data/loader.py", "SeedSequence((self.seed, epoch))", "SeedSequence((self.seed, 0))", DATA),
    M("data/loader.py", "SeedSequence((self.seed, epoch))", "SeedSequence((0, epoch))", DATA),
    M(
        "data/batches.py",
        "slice(first + self.rank, first + self.batch, self.world)",
        "slice(first, first + self.batch, self.world)",
        DATA,
    ),
]
