"""Temperature scaling against scipy's minimum, and in `heedful export`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar

import heedful
from heedful.cli import main
from heedful.evaluate.calibration import calibrate, fit_temperature
from heedful.loaded import Loaded
from heedful.text.train import train_wordpiece
from support.tiny import tiny

TEXTS = ["a good film", "a bad film", "not good", "not bad at all", "good", "bad", "so bad", "a film"]


@pytest.mark.parametrize("sharpness", [0.3, 1.0, 4.0])
def test_the_temperature_is_where_the_cross_entropy_is_lowest(sharpness):
    torch.manual_seed(0)
    logits = torch.randn(500, 3)
    right = torch.distributions.Categorical(logits=logits).sample()
    p = (sharpness * logits).softmax(dim=1)

    def loss(t):
        return float(torch.nn.functional.cross_entropy(p.double().log() / t, right))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-6}).x
    assert fit_temperature(p, right) == pytest.approx(best, rel=1e-3)


def test_a_calibrated_classifier_says_the_same_with_other_probabilities(tmp_path, capsys):
    tokenizer = train_wordpiece(TEXTS * 5, 100)
    torch.manual_seed(0)
    model = tiny("bert", vocab_size=len(tokenizer), head="classify", labels=("fine", "poor"), n_labels=2).eval()
    with torch.no_grad():
        model.head.classifier.weight.mul_(3)
    loaded = Loaded(model, tokenizer, "sure")
    said = [labels[i % 5 == 0].name for i, labels in enumerate(loaded.classify(TEXTS))]  # two of eight are wrong
    data = tmp_path / "data.tsv"
    data.write_text("text\tlabel\n" + "".join(f"{t}\t{label}\n" for t, label in zip(TEXTS, said, strict=True)))
    loaded.save(tmp_path / "sure")
    assert main(["export", str(tmp_path / "sure"), str(tmp_path / "calm"), "--calibrate", str(data)]) == 0
    assert "divided by" in capsys.readouterr().out
    before, after = loaded.classify(TEXTS), heedful.load(tmp_path / "calm").classify(TEXTS)
    assert [labels[0].name for labels in before] == [labels[0].name for labels in after]
    assert np.mean([a[0].score for a in after]) < np.mean([b[0].score for b in before])
    assert calibrate(heedful.load(tmp_path / "calm"), data) == pytest.approx(1, rel=1e-3)
    with pytest.raises(ValueError, match="bert"):
        calibrate(Loaded(tiny("bert", vocab_size=len(tokenizer), head="masked").eval(), tokenizer, "a bert"), data)
