//! Containers of pipelines: several networks and their configurations in one file (section 12 of the format).

use crate::golden::pipeline::{F16, REFERENCE_Q4T, container};

#[test]
fn golden_containers_are_rebuilt_byte_for_byte() {
    for (name, bytes, hash) in [(F16, 3_132_265, 0), (REFERENCE_Q4T, 4_724_999, 0)] {
        let file = std::fs::read(container(name)).unwrap();
        assert_eq!((file.len(), cmf_gpu::format::hash64(&file)), (bytes, hash), "{name}");
    }
}
