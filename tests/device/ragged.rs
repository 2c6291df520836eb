//! Matrices whose columns are not a multiple of 32: weights and activations after a row's last column have no effect.

use crate::masks::{Network, apart, gathered, golden, greedy, logits, prompt};
use cmf_gpu::dtype::Dtype;
use cmf_gpu::dtype::encode::encode;
use cmf_gpu::dtype::planes::Planes;

/// A golden model of which each layer has fewer neurons than the one before, whose activations are still in the buffer.
fn narrowing(name: &'static str, dtype: Dtype) -> Network {
    let golden = golden(name);
    let neurons = golden.tensors.header().arch.intermediate_size;
    Network::of(&golden, &|tensor| {
        let Some((layer, part)) = tensor
            .0
            .strip_prefix("model.layers.")
            .and_then(|rest| rest.split_once('.'))
        else {
            return vec![tensor];
        };
        let layer: usize = layer.parse().unwrap();
        let kept: Vec<usize> = (0..neurons - 3 - 7 * layer).collect();
        let all: Vec<usize> = (0..*tensor.2.last().unwrap() as usize).collect();
        let rows: Vec<usize> = (0..tensor.2[0] as usize).collect();
        let (name, _, shape, bytes) = match part {
            "mlp.gate_proj.weight" | "mlp.up_proj.weight" => gathered(tensor, &kept, &all),
            "mlp.down_proj.weight" => gathered(tensor, &rows, &kept),
            _ => return vec![tensor],
        };
        let [rows, cols] = [shape[0] as usize, shape[1] as usize];
        let decoder = Dtype::F16.decoder(&bytes, rows, cols).unwrap();
        let payload = encode(dtype, rows, cols, &|first, out| {
            let lines = out.chunks_exact_mut(cols).enumerate();
            lines.for_each(|(i, line)| decoder.row(first + i, line));
            Ok(())
        });
        vec![(name, dtype, shape, payload.unwrap())]
    })
}

#[test]
fn what_another_layer_left_after_a_row_has_no_effect() {
    let name = "qwen2";
    let tokens = prompt(name);
    for dtype in [Dtype::Q4Block, Dtype::Q8Row, Dtype::Q82f, Dtype::F16] {
        let network = narrowing(name, dtype);
        let plan = network.plan(crate::device().max_binding());
        let flat = plan
            .graph
            .matrices
            .iter()
            .filter(|matrix| matrix.planes == Planes::Nib4Flat);
        assert_eq!(
            flat.count() > 1,
            dtype == Dtype::Q4Block,
            "{}: straddling groups",
            dtype.name()
        );
        let [mut device, mut host] = crate::PLACES.map(|place| network.session(place));
        for prefill in [0, 5, tokens.len()] {
            let [found, wanted] = [&mut device, &mut host].map(|session| logits(session, &tokens, prefill));
            let apart = apart(&found, &wanted);
            assert!(
                apart < 1e-5,
                "{}, prefill {prefill}: they differ by {apart:e}",
                dtype.name()
            );
        }
        let [found, wanted] = [&mut device, &mut host].map(|session| greedy(session, &tokens));
        assert_eq!(found, wanted, "{}", dtype.name());
    }
}
