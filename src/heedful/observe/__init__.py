"""Interpretability: activations, attention, logit lens, ablation and patching, fill-in-the-blank, figures and pages."""
