"""Reading the exposition format."""

from prometheus_client.parser import text_string_to_metric_families


def samples(text: str) -> dict[str, float]:
    """Values by name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def labelled(text: str, name: str, label: str) -> dict[str, float]:
    """Values of `penstock:name` by a label, summed over the others."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"penstock:{name}":
                value = sample.labels[label]
                found[value] = found.get(value, 0.0) + sample.value
    return found
