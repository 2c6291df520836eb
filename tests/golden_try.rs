use cmf_gpu::container::{Container, Tensors};
use cmf_gpu::gpu::{Device, DeviceOptions, GpuExecutor, adapters};
use cmf_gpu::kernel::Kv;
use cmf_gpu::model::bind;
use cmf_gpu::program::{PlanOptions, plan};
use cmf_gpu::sampling::Sampling;
use cmf_gpu::session::{Cancel, Generation, Session};
use std::sync::Arc;
use std::time::Instant;

#[test]
fn smol() {
    let t = Instant::now();
    let path = std::env::var("M").unwrap();
    let c = Container::open(std::path::Path::new(&path)).unwrap();
    let model = bind(&c.header().arch, &c).unwrap();
    println!("bind {:?}", t.elapsed());
    let all = adapters();
    println!("adapters {:?}", t.elapsed());
    let device = Arc::new(
        Device::open(
            &all[0],
            DeviceOptions {
                checked_shaders: std::env::var("CHECKED").is_ok(),
                force_tree: std::env::var("TREE").is_ok(),
                ..Default::default()
            },
        )
        .unwrap(),
    );
    println!("device {:?} {:?}", t.elapsed(), device.team());
    let options = PlanOptions {
        ctx: 256,
        chunk: 64,
        kv: Kv::F16,
        max_binding: device.max_binding(),
        all_logits: false,
    };
    let plan = Arc::new(plan(&model, &c, &options).unwrap());
    println!(
        "decode steps {} weights {} file {}",
        plan.programs[0].steps.len(),
        plan.weight_bytes(),
        c.file_bytes()
    );
    let exec = GpuExecutor::new(device.clone(), plan.clone(), &c, &mut |_, _| Ok(())).unwrap();
    println!("loaded {:?} {:?}", t.elapsed(), device.compile_counters());
    let mut s = Session::new(plan, Box::new(exec));
    let prompt: Vec<u32> = std::env::var("P")
        .unwrap()
        .split(',')
        .map(|x| x.parse().unwrap())
        .collect();
    let t1 = Instant::now();
    s.prefill(&prompt, &Cancel::new()).unwrap();
    let mut first = None;
    let n: usize = std::env::var("N").map_or(16, |n| n.parse().unwrap());
    let mut out = vec![];
    let g = Generation {
        sampling: Sampling::greedy(),
        stops: vec![2],
        max_tokens: n,
    };
    let f = s
        .generate(&g, &Cancel::new(), &mut |t| {
            first.get_or_insert(t1.elapsed());
            out.push(t);
            std::ops::ControlFlow::Continue(())
        })
        .unwrap();
    let total = t1.elapsed();
    println!(
        "first token {:?} since start {:?}; decode {:.2} tok/s; {out:?} {f:?}",
        first,
        t.elapsed(),
        (out.len() - 1) as f64 / (total - first.unwrap()).as_secs_f64()
    );
    println!("{:?}", s.counters());
    let _ = c.infos();
}
