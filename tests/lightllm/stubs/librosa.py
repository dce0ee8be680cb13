"""Stands for librosa, which LightLLM imports for audio: these tests have none."""
