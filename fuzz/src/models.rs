//! Opening a file as a model, as executors do.

use crate::{bounded, on_disk};
use cmf_gpu::dtype::planes::{Amount, Origin};
use cmf_gpu::graph::{Measured, planes};
use cmf_gpu::lm::{ExpertOptions, LowerOptions, lower};
use cmf_gpu::model::{HeadInput, bind};
use cmf_gpu::options::Kv;
use cmf_gpu::source::{Tensors, open};

const OPTIONS: LowerOptions = LowerOptions {
    ctx: 64,
    chunk: 16,
    kv: Kv::F16,
    max_binding: 128 << 20,
    all_logits: false,
    drafts: 0,
    draft_input: HeadInput::Stream,
    experts: ExpertOptions {
        counted: false,
        slots: None,
    },
};

/// Writes `input` to the file `name` and opens that: verifies the model, plans it, and reads every tensor.
pub fn check_model(name: &str, input: &[u8]) {
    let path = on_disk(name, input);
    bounded(input.len(), || {
        let Ok(source) = open(&path) else { return };
        let tensors: &dyn Tensors = &*source.tensors;
        let report = source.verify(&mut |_, _| ()).expect("the file is still there");
        for id in 0..tensors.infos().len() {
            let Ok(stored) = tensors.stored(id) else { continue };
            let (rows, cols) = stored.info.rows_cols();
            let decoder = stored.decoder().expect("the payload has the size of its shape");
            let mut row = vec![0.0; cols];
            (0..rows.min(64)).for_each(|index| decoder.row(index, &mut row));
            if planes(tensors, id).is_ok() {
                let source = stored.source().expect("a tensor with a layout can be repacked");
                let origin = Origin {
                    first: 0,
                    before: Amount::default(),
                };
                let mut codes = vec![0; source.code_bytes(origin, &(0..1))];
                let _ = source.codes(origin, 0..1, &mut codes);
            }
        }
        if let Ok(model) = bind(&source.arch, tensors) {
            let _ = lower(&model, tensors, &OPTIONS, &Measured::default());
        }
        let _ = report.ok();
    });
}
