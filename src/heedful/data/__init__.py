"""What models learn from: files become examples, examples become batches, in an order that can be entered anywhere."""
