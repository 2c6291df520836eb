//! The tensors of a pipeline as its graphs read them: convolutions are matrices whose columns are the channels of each tap.

use super::network::{Conv, Network, Resnet, Vae};
use crate::error::{Result, bail};
use crate::source::{Place, Stored, TensorId, TensorInfo, Tensors};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// The tensors of a pipeline. A convolution `[outputs, inputs, side, side]` becomes a matrix `[outputs, side² · inputs]`, in which
/// the inputs of a tap follow each other, padded with zeros to whole groups of 32. Other tensors are those of the source.
pub struct ImageTensors {
    source: Arc<dyn Tensors>,
    infos: Vec<TensorInfo>,
    convs: HashMap<TensorId, Conv>,
}

impl ImageTensors {
    /// The tensors of a network's source.
    pub fn new(source: Arc<dyn Tensors>, network: &Network) -> ImageTensors {
        let mut infos = source.infos().to_vec();
        let convs: HashMap<_, _> = convs(&network.vae).map(|conv| (conv.weight, conv)).collect();
        for (&id, conv) in &convs {
            let info = &mut infos[id];
            let bytes = info.nbytes / (conv.outputs * conv.inputs * conv.side * conv.side).max(1) as u64;
            info.shape = vec![conv.outputs as u64, columns(conv) as u64];
            info.nbytes = bytes * (conv.outputs * columns(conv)) as u64;
        }
        ImageTensors { source, infos, convs }
    }
}

/// Columns of a convolution as a matrix.
fn columns(conv: &Conv) -> usize {
    conv.side * conv.side * conv.inputs.next_multiple_of(32)
}

/// Every convolution of the decoder.
fn convs(vae: &Vae) -> impl Iterator<Item = Conv> {
    let resnet = |net: &Resnet| [Some(net.conv1), Some(net.conv2), net.shortcut].into_iter().flatten();
    let blocks = vae.blocks.iter().flat_map(move |block| {
        let resnets = block.resnets.iter().flat_map(resnet);
        resnets.chain(block.upsample).collect::<Vec<_>>()
    });
    let mid: Vec<Conv> = vae.mid.iter().flat_map(resnet).collect();
    let ends = [vae.post_quant, Some(vae.conv_in), Some(vae.conv_out)];
    ends.into_iter().flatten().chain(mid).chain(blocks)
}

/// The payload of a convolution as a matrix.
fn by_tap(conv: &Conv, payload: &[u8]) -> Vec<u8> {
    let taps = conv.side * conv.side;
    let element = payload.len() / (conv.outputs * conv.inputs * taps);
    let padded = conv.inputs.next_multiple_of(32);
    let mut matrix = vec![0; conv.outputs * taps * padded * element];
    for (from, value) in payload.chunks_exact(element).enumerate() {
        let (output, input, tap) = (from / (conv.inputs * taps), from / taps % conv.inputs, from % taps);
        let to = ((output * taps + tap) * padded + input) * element;
        matrix[to..to + element].copy_from_slice(value);
    }
    matrix
}

impl Tensors for ImageTensors {
    fn infos(&self) -> &[TensorInfo] {
        &self.infos
    }

    fn find(&self, name: &str) -> Option<TensorId> {
        self.source.find(name)
    }

    fn stored(&self, id: TensorId) -> Result<Stored<'_>> {
        let stored = self.source.stored(id)?;
        let Some(conv) = self.convs.get(&id) else {
            return Ok(stored);
        };
        if !stored.order.is_same() {
            bail!(
                Internal,
                "tensor '{}' is a convolution in another order",
                stored.info.name
            );
        }
        Ok(Stored {
            info: &self.infos[id],
            bytes: Cow::Owned(by_tap(conv, &stored.bytes)),
            order: stored.order,
        })
    }

    fn place(&self, id: TensorId) -> Option<Place> {
        self.source.place(id).filter(|_| !self.convs.contains_key(&id))
    }

    fn release(&self, id: TensorId) {
        self.source.release(id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_of_a_tap_follow_each_other() {
        let conv = Conv {
            weight: 0,
            bias: 0,
            outputs: 2,
            inputs: 3,
            side: 3,
        };
        let payload: Vec<u8> = (0..54).collect();
        let matrix = by_tap(&conv, &payload);
        assert_eq!(matrix.len(), 2 * 9 * 32);
        for (output, input, tap) in [(0, 0, 0), (0, 2, 5), (1, 1, 8)] {
            let from = (output * 3 + input) * 9 + tap;
            assert_eq!(matrix[(output * 9 + tap) * 32 + input], payload[from]);
        }
        assert_eq!(matrix.iter().filter(|&&byte| byte != 0).count(), 53);
    }
}
