"""What two halves of a layer have between them: sum of parts, residual, RMSNorm."""
