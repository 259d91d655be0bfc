"""Pure math: tensors in, tensors out. No module state, no configuration objects; import the file you need."""
