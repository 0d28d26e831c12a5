"""The engine: an explicit schedule over traced pieces and stores."""
