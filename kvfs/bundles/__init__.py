"""Pages that leave a store or enter one: bundles, the drop folder, safetensors files."""
