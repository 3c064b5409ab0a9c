"""The contract of every row of ``EXPORTS``, and of every row of data ``SOURCES``: what is promised holds for all."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import hetdpt
from hetdpt.core.errors import FileError, ModelError
from hetdpt.core.plan import Plan
from hetdpt.data.table import FORMS, SOURCES, source_of
from hetdpt.export.exported import export_model
from hetdpt.export.runtimes import EXPORTS, ExportRuntime, runtime_of
from hetdpt.export.saved import save
from hetdpt.flow.config import RunConfig
from hetdpt.measurement.agreement import outputs_of

ROOT = Path(__file__).parent.parent
PARITY = 1e-4  # of the largest output: two runtimes sum float32 in different orders
rows = pytest.mark.parametrize("row", EXPORTS.values(), ids=lambda row: row.name)


@rows
def test_a_pruned_model_is_exported_and_agrees_with_torch_at_any_batch(
    row: ExportRuntime, model: nn.Module, tmp_path: Path
) -> None:
    hetdpt.merge_(hetdpt.prune_(model, Plan((0,), (1,))))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = export_model(model, tmp_path / row.file)
    assert result.relative_difference < PARITY
    assert [path.name for path in tmp_path.iterdir()] == [row.file]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    images = torch.randn(5, *hetdpt.adapters.models.input_size_of(model))
    with torch.no_grad():
        [expected] = outputs_of(model, images)
    [got] = row.load().open_file(result.path)(images)
    torch.testing.assert_close(got, expected, rtol=PARITY, atol=PARITY)


@rows
def test_what_cannot_be_exported_is_refused_and_leaves_nothing(
    row: ExportRuntime, model: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=f"{row.runner} differs from torch by .*; the model was not exported"):
        export_model(model, tmp_path / row.file, tolerance=-1.0)
    with pytest.raises(ModelError, match="has gates on its layers"):
        export_model(hetdpt.gate_(model, Plan((1,))), tmp_path / row.file)
    assert not list(tmp_path.iterdir())
    (tmp_path / row.file).mkdir()
    with pytest.raises(FileError, match=f"is a directory; give the name of a file, such as .*{row.file}"):
        export_model(hetdpt.restore_(model), tmp_path / row.file, overwrite=True)


@rows
def test_missing_packages_are_named_with_the_extra_that_installs_them(row: ExportRuntime) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {name.partition(">")[0] for name in extras.get(row.extra, [])} >= {*row.packages} - {"torch"}
    with pytest.raises(
        ModelError, match=rf"export to {row.title} needs no_such_package; install hetdpt\[{row.extra}\]"
    ):
        replace(row, packages=("no_such_package",)).load()


@rows
def test_command_line_run_card_and_docs_follow_the_table(row: ExportRuntime, model: nn.Module, tmp_path: Path) -> None:
    assert runtime_of(Path("some") / f"file{row.suffix}") is row
    config = RunConfig(model="demo", data="demo", out=tmp_path, layers=1, export=(row.name,))
    assert config.exports == (row,)
    card = (save(model, tmp_path / "saved") / "README.md").read_text()
    assert f"--out {row.file}` writes it for {row.runner}" in card


def test_names_and_suffixes_are_unique_and_others_are_refused(tmp_path: Path) -> None:
    assert len({row.suffix for row in EXPORTS.values()}) == len(EXPORTS)
    with pytest.raises(FileError, match=r"model.bin does not say what to export to; give a file that ends in \.onnx"):
        runtime_of(Path("model.bin"))
    with pytest.raises(ModelError, match="models are exported to onnx.*, not to 'tensorrt'"):
        RunConfig(model="demo", data="demo", out=tmp_path, layers=1, export=("tensorrt",))
    assert RunConfig(model="demo", data="demo", out=tmp_path, layers=1, onnx=True).exports == (EXPORTS["onnx"],)


@pytest.mark.parametrize("row", SOURCES, ids=lambda row: row.form)
def test_a_source_of_data_has_an_opener_and_is_documented(row: hetdpt.data.table.DataSource) -> None:
    assert callable(row.open)
    assert row.form in FORMS
    name = row.form.replace("NAME", "x").replace("FOLDER", "x") if row.prefix else "x"
    assert source_of(name) is row
    assert row.prefix in (ROOT / "docs" / "training.md").read_text()
