"""What commands share: flags and words, sampling, tables, kept lines, adapters on one base, curves as pictures."""
