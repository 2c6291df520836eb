//! Hand-made files, in which each field can be set independently. Shares only the checksum with the writer.

use cmf_gpu::format::hash64;
use serde_json::{Value, json};

/// A directory record and its payload.
#[derive(Clone)]
pub struct Record {
    pub name: Vec<u8>,
    pub dtype: u8,
    pub ndim: u8,
    pub shape: [u32; 6],
    pub payload: Vec<u8>,
    /// Replace the values that follow from the payload and its position.
    pub name_off: Option<u32>,
    pub name_len: Option<u16>,
    pub off: Option<u64>,
    pub nbytes: Option<u64>,
    pub hash: Option<u64>,
}

/// A description of a file.
#[derive(Clone)]
pub struct Raw {
    pub features: u32,
    /// The text of the header; JSON in the sample.
    pub header: Vec<u8>,
    pub records: Vec<Record>,
    pub masks: Vec<u8>,
    pub vocab: Vec<u8>,
    pub index: Vec<u8>,
    /// Replace the two fields of the directory's head.
    pub count: Option<u64>,
    pub pool_off: Option<u64>,
}

pub fn record(name: &str, dtype: u8, shape: &[u32], payload: Vec<u8>) -> Record {
    let mut dims = [0; 6];
    dims[..shape.len()].copy_from_slice(shape);
    Record {
        name: name.into(),
        dtype,
        ndim: shape.len() as u8,
        shape: dims,
        payload,
        name_off: None,
        name_len: None,
        off: None,
        nbytes: None,
        hash: None,
    }
}

pub fn header() -> Value {
    json!({
        "format": "cmf", "version": 2,
        "arch": {
            "arch_name": "sample", "hidden_size": 64, "intermediate_size": 128, "num_layers": 2,
            "num_attention_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 32,
            "layer_types": ["FullAttention", "SlidingAttention"], "rms_norm_eps": 1e-6, "norm_style": "qwen",
            "sliding_window": 8, "moe": null, "max_position_embeddings": 512
        },
        "tokenizer_config": {"eos_token_ids": [1, 2], "bos_token_id": null},
        "provenance": {"tool": "by hand"}
    })
}

/// A masks section without masks.
pub const NO_MASKS: &[u8] = b"\0\0\0\0\x0c\0\0\0{\"masks\":[]}";

/// 1.0 as f16, the scale of every payload.
const ONE: [u8; 2] = [0x00, 0x3C];

fn concat(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

/// One tensor of each type, and every section.
pub fn sample() -> Raw {
    let tile = |codes: usize| concat(&[&ONE, &vec![0x55; codes]]);
    let tiles = |codes: usize, n: usize| tile(codes).repeat(n);
    let word = |v: u32| v.to_le_bytes();
    let records = vec![
        record("f32", 0, &[3, 5], 1f32.to_le_bytes().repeat(15)),
        record("f16", 1, &[64], ONE.repeat(64)),
        record("bf16", 2, &[2, 3, 4], [0x80, 0x3F].repeat(24)),
        record("q8_row", 3, &[4, 33], concat(&[&[7; 4 * 33], &ONE.repeat(4)])),
        record("q4_block", 4, &[5, 7], concat(&[&[0x9A; 32], &ONE.repeat(2)])),
        // Rows of 3 and 8 bits.
        record(
            "vbit",
            8,
            &[2, 32],
            concat(&[&[3, 8], &ONE.repeat(2), &[0x5A; 12 + 32]]),
        ),
        record("q8_2f", 9, &[2, 33], concat(&[&[7; 66], &ONE.repeat(2 + 33)])),
        record(
            "vbit_ro",
            10,
            &[2, 32],
            concat(&[
                &[4, 5],
                &ONE.repeat(2),
                &word(0),
                &word(16),
                &word(36),
                &[0x5A; 16 + 20],
            ]),
        ),
        record("q4_tiled", 11, &[2, 64], tiles(16, 4)),
        record("q1", 12, &[2, 64], tiles(4, 4)),
        record(
            "q1s",
            13,
            &[2, 32],
            concat(&[&tiles(4, 2), &word(2), &word(63), &ONE, &word(0), &ONE]),
        ),
        record(
            "q1t",
            14,
            &[2, 32],
            concat(&[
                &tiles(7, 2),
                &word(0),
                &word(1),
                &word(2),
                &[5, 0],
                &ONE,
                &[31, 0],
                &ONE,
            ]),
        ),
        record(
            "q4tp",
            15,
            &[2, 64],
            concat(&[&[0x9A; 64], &[0, 0xC4, 0, 0x2C].repeat(2), &[0x21, 0x03].repeat(2)]),
        ),
    ];
    Raw {
        features: 0b111,
        header: header().to_string().into_bytes(),
        records,
        masks: NO_MASKS.to_vec(),
        vocab: b"{\"model\": {}}".to_vec(),
        index: vec![0; 8],
        count: None,
        pool_off: None,
    }
}

impl Raw {
    pub fn with_header(mut self, change: impl FnOnce(&mut Value)) -> Raw {
        let mut json: Value = serde_json::from_slice(&self.header).expect("the sample's header is JSON");
        change(&mut json);
        self.header = json.to_string().into_bytes();
        self
    }

    pub fn record(&mut self, name: &str) -> &mut Record {
        self.records
            .iter_mut()
            .find(|record| record.name == name.as_bytes())
            .expect("a record of the sample")
    }

    pub fn with(mut self, change: impl FnOnce(&mut Raw)) -> Raw {
        change(&mut self);
        self
    }

    /// The bytes before the blob, and the blob.
    pub fn head_and_blob(&self) -> (Vec<u8>, Vec<u8>) {
        let mut blob = Vec::new();
        let mut records = Vec::new();
        let mut pool = Vec::new();
        for record in &self.records {
            let off = blob.len() as u64;
            blob.extend_from_slice(&record.payload);
            blob.resize(blob.len().next_multiple_of(64), 0);
            records.extend_from_slice(&record.name_off.unwrap_or(pool.len() as u32).to_le_bytes());
            records.extend_from_slice(&record.name_len.unwrap_or(record.name.len() as u16).to_le_bytes());
            records.extend_from_slice(&[record.dtype, record.ndim]);
            record
                .shape
                .iter()
                .for_each(|dim| records.extend_from_slice(&dim.to_le_bytes()));
            records.extend_from_slice(&record.off.unwrap_or(off).to_le_bytes());
            records.extend_from_slice(&record.nbytes.unwrap_or(record.payload.len() as u64).to_le_bytes());
            records.extend_from_slice(&record.hash.unwrap_or_else(|| hash64(&record.payload)).to_le_bytes());
            pool.extend_from_slice(&record.name);
        }
        // Space for one record with an excessive count.
        blob.resize(blob.len() + 64, 0);
        let mut directory = Vec::new();
        directory.extend_from_slice(&self.count.unwrap_or(self.records.len() as u64).to_le_bytes());
        directory.extend_from_slice(&self.pool_off.unwrap_or(16 + records.len() as u64).to_le_bytes());
        directory.append(&mut records);
        directory.append(&mut pool);

        let mut head = vec![0; 128];
        head[..4].copy_from_slice(b"CMF\x01");
        head[4] = 2;
        head[12..16].copy_from_slice(&self.features.to_le_bytes());
        let mut put = |at: usize, v: u64| head[at..at + 8].copy_from_slice(&v.to_le_bytes());
        let dir_off = 128 + self.header.len() as u64;
        let data_off = (dir_off + directory.len() as u64).next_multiple_of(4096);
        put(0x10, 128);
        put(0x18, self.header.len() as u64);
        put(0x20, dir_off);
        put(0x28, directory.len() as u64);
        put(0x30, data_off);
        put(0x38, blob.len() as u64);
        let mut end = data_off + blob.len() as u64;
        for (at, section) in [(0x40, &self.masks), (0x50, &self.vocab), (0x60, &self.index)] {
            if !section.is_empty() {
                put(at, end);
                put(at + 8, section.len() as u64);
                end += section.len() as u64;
            }
        }
        put(0x70, hash64(&self.header));
        put(0x78, hash64(&directory));
        head.extend_from_slice(&self.header);
        head.append(&mut directory);
        head.resize(data_off as usize, 0);
        (head, blob)
    }

    pub fn build(&self) -> Vec<u8> {
        let (mut file, blob) = self.head_and_blob();
        file.extend_from_slice(&blob);
        for section in [&self.masks, &self.vocab, &self.index] {
            file.extend_from_slice(section);
        }
        file
    }
}
