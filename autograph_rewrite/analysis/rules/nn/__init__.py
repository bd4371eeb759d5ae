"""Rules of neural-network layers: convolutions, losses, normalization, pooling, recurrent cells, images."""
