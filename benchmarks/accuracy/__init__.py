"""The accuracy table: pre-trains a small model, fine-tunes it in every precision, and measures what each one costs.

    python benchmarks/accuracy COMMAND --out DIR [--tiny]

benchmarks/evidence/accuracy.md describes the commands and the results.
"""
