"""A conformance kit: small models of each family, and what every engine must compute with them."""
