"""Settings for all tests."""

import torch

torch.set_num_threads(1)  # the models are tiny and the tests run side by side: more threads only get in each other's way
