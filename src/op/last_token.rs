//! Makes the last token of a batch the only one.

use super::define::*;

operator! {
    last_token
    params {
        vectors: u32,
    }
    bindings {
        read source: array<vec4<f32>>;
        write to: array<vec4<f32>>, batch: Batch;
    }
    threads Some(256),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let tokens = o.tokens("batch")?;
    let Some(last) = tokens.last() else {
        return Ok(());
    };
    let len = p.vectors as usize * 4;
    let row = o.words("source", (tokens.len() - 1) * len, len)?.to_vec();
    o.words_mut("to", 0, len)?.copy_from_slice(&row);
    o.store_tokens("batch", &[*last])
}
