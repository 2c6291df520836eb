//! Sets the elements that a mask leaves out to zero.

use super::define::*;

operator! {
    zero_masked
    params {
        vectors: u32,
    }
    bindings {
        read batch: Batch, bits: array<u32>;
        write y: array<vec4<f32>>;
    }
    threads Some(64),
    grid |p| Grid::Threads(p.vectors, 1),
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let stride = p.vectors as usize * 4;
    let bits = o.words("bits", 0, stride.div_ceil(32))?.to_vec();
    for t in 0..o.count("batch")? {
        for (i, word) in o.words_mut("y", t * stride, stride)?.iter_mut().enumerate() {
            if bits[i / 32] >> (i % 32) & 1 == 0 {
                *word = 0;
            }
        }
    }
    Ok(())
}
