// Keys and values that are stored as f16, two in a word.
alias Kv4 = vec2<u32>;
fn kv_pack(v: vec4<f32>) -> Kv4 { return vec2<u32>(pack2x16float(v.xy), pack2x16float(v.zw)); }
fn kv_unpack(v: Kv4) -> vec4<f32> { return vec4<f32>(unpack2x16float(v.x), unpack2x16float(v.y)); }
