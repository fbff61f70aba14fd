"""Settings for all tests."""

import torch

torch.set_num_threads(1)  # the models are tiny and two tests run side by side
