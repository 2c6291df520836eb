// Keys and values that are stored as f32.
alias Kv4 = vec4<f32>;
fn kv_pack(v: vec4<f32>) -> Kv4 { return v; }
fn kv_unpack(v: Kv4) -> vec4<f32> { return v; }
