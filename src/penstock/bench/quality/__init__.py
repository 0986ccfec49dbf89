"""Quality of weight formats on a text: the measurement of `penstock eval`."""
