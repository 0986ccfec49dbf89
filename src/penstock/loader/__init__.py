"""Model loading: weight files, quantised checkpoints, calibration data."""
