"""What several kernel packs share: headers in CUDA C++ (`include`), and the Python that launches what they hold."""
