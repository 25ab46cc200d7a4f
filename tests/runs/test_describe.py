from dataclasses import replace

from became_avalanche.benchmarks import cifar, five
from became_avalanche.runs.catalogue import BENCHMARKS
from became_avalanche.runs.components import STREAMS
from became_avalanche.runs.describe import SOURCES, all_sources, describe_source, list_benchmarks, show_benchmark


def test_benchmarks_as_text():
    listed = list_benchmarks(BENCHMARKS.values()).splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(BENCHMARKS)
    assert listed[1].split() == ["split-digits", "5", "MultiHeadMLP", "embedded"]
    assert all((line.split()[-1] == "embedded") == ("-digits" in line) for line in listed[1:])
    shown = show_benchmark(BENCHMARKS["20-split-cifar100-nscl"])
    assert "split_cifar100(n_tasks=20, protocol='nscl')" in shown
    assert "\n  all methods: batch_size 16, learning_rate 0.0001, " in shown
    assert "nscl: a 30, coefficient 100, reference True\n" in f"{shown}\n"
    assert "ewc: ewc_lambda 1000 (untuned default)" in shown
    shown = show_benchmark(BENCHMARKS["10-split-cifar100"])
    assert "sgp: learning_rate 0.05, batch_size 64, epochs 200, patience 6, factor 2, lr_min 5e-05\n" in shown
    assert "\n  other methods: learning_rate 0.01, " in shown
    assert "five_datasets_in_turn()" in show_benchmark(BENCHMARKS["5-datasets"])
    assert "untuned" not in show_benchmark(BENCHMARKS["split-digits"])


def test_every_stream_that_reads_files_says_which():
    reading = {name for name in STREAMS if not name.endswith("-digits")}
    assert SOURCES.keys() == reading
    for benchmark in BENCHMARKS.values():
        assert benchmark.stream.reads_files == (benchmark.stream.name in SOURCES)


def test_data_sets_as_text(tmp_path):
    texts = {source.name: describe_source(source, tmp_path) for source in all_sources()}
    assert len(texts) == len(all_sources()) == 8
    assert all(text.startswith(f"{name}: missing\n") for name, text in texts.items())
    assert "downloaded automatically when a run needs it; or get cifar-100-" in texts["CIFAR-100"]
    assert "downloaded" not in texts["notMNIST"]
    for member in five.MEMBERS.values():
        place = tmp_path / member.source.folder
        place.mkdir(parents=True)
        assert describe_source(member.source, tmp_path).startswith(
            f"{member.source.name}: incomplete or corrupt\n  {place}"
        )


def test_a_data_set_that_is_there(tmp_path):
    source = replace(cifar.CIFAR_100, check=lambda place: 7)
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(bytes(2_000_000))
    expected = f"CIFAR-100: found\n  {tmp_path / 'cifar-100-python'}, 2 MB, 7 training images"
    assert describe_source(source, tmp_path) == expected
