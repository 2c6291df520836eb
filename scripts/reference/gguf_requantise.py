#!/usr/bin/env python3
"""A GGUF file with its matrices in another type, and the same values as f32, both made by the Python package `gguf`.

    gguf_requantise.py SOURCE.gguf TYPE OUT.gguf REFERENCE.gguf

TYPE is one that the package can quantise: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 TQ1_0 TQ2_0 F16 BF16. A matrix whose rows are no whole blocks
keeps its values as f32. Both files must have the same logits (`cmf-gpu logits`), to within the order of sums.
"""
import sys

import numpy
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFValueType, GGUFWriter, quants

SKIPPED = ("GGUF.", "general.architecture")


def copy_keys(reader, writer):
    for name, field in reader.fields.items():
        if name.startswith(SKIPPED):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, inner)


def main(source, name, out, reference):
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writers = [GGUFWriter(path, architecture) for path in (out, reference)]
    for writer in writers:
        copy_keys(reader, writer)
    kind = Type[name]
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        quantised = None
        if values.ndim > 1:
            try:
                quantised = quants.quantize(values, kind)
            except quants.QuantError:
                pass
        if quantised is None:
            for writer in writers:
                writer.add_tensor(tensor.name, values)
            continue
        writers[0].add_tensor(tensor.name, quantised, raw_dtype=kind)
        writers[1].add_tensor(tensor.name, quants.dequantize(quantised, kind).astype(numpy.float32))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
