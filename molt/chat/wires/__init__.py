"""The protocols of stock clients. Each module has the functions of `shared.Wire`, pure, on JSON bodies."""
