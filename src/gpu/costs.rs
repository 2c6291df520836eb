//! Measures a device's basic operations: reading memory, a dependent dispatch, encoding a dispatch, an empty workgroup.

use super::device::Device;
use super::memory::create;
use super::probe::Probe;
use crate::error::Result;
use crate::op::Access;
use std::time::Instant;

const STREAM: &str = include_str!("../../shaders/probe/stream.wgsl");
const TICK: &str = include_str!("../../shaders/probe/tick.wgsl");
/// Workgroups of the stream kernel; a test compares it with the shader.
const STREAM_GROUPS: u32 = 2048;
/// Dispatches of one measurement.
const DISPATCHES: u32 = 1000;
/// Empty workgroups of one measurement.
const EMPTY_GROUPS: u32 = 60_000;

/// Costs of a device, each the lowest of several measurements.
#[derive(Clone, Copy, Debug, serde::Serialize)]
pub struct Costs {
    /// Highest rate at which a kernel reads memory, in 10⁹ bytes per second.
    pub stream_gb_s: f64,
    /// Bytes that the stream kernel reads in one measurement.
    pub stream_bytes: u64,
    /// Microseconds of a dispatch that depends on the previous one.
    pub dispatch_us: f64,
    /// Microseconds of host time to encode a dispatch.
    pub encode_us: f64,
    /// Nanoseconds of a workgroup that returns at once.
    pub empty_workgroup_ns: f64,
    /// Microseconds from a submission until the host has seen it finish.
    pub round_trip_us: f64,
}

/// Measures a device. Errors: `DeviceError`, `DeviceLost`, `OutOfMemory`.
pub fn costs(device: &Device) -> Result<Costs> {
    let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST;
    let stream_bytes = device.max_binding().min(256 << 20) / 16 * 16;
    let scope = device.scope();
    let data = create(device, "probe.data", stream_bytes, storage);
    let limit = create(device, "probe.limit", 256, storage);
    let out = create(device, "probe.out", u64::from(STREAM_GROUPS) * 4, storage);
    scope.finish()?;
    device.queue.write_buffer(&limit, 0, &1u32.to_le_bytes());
    let bound = |input| [(input, Access::Read), (&out, Access::Write)];
    let stream = Probe::new(device, "probe.stream", STREAM, &bound(&data))?;
    let tick = Probe::new(device, "probe.tick", TICK, &bound(&limit))?;

    // The first round warms up and does not count.
    let best = |probe: &Probe, dispatches: u32, groups: u32| -> Result<(f64, f64)> {
        let mut best = (f64::INFINITY, f64::INFINITY);
        for round in 0..6 {
            let (encode, total) = time(device, probe, dispatches, groups)?;
            if round > 0 {
                best = (best.0.min(encode), best.1.min(total));
            }
        }
        Ok(best)
    };
    let round_trip = best(&tick, 1, 1)?.1;
    let read = best(&stream, 1, STREAM_GROUPS)?.1;
    let (encode, dispatches) = best(&tick, DISPATCHES, 1)?;
    let empty = best(&tick, 1, EMPTY_GROUPS)?.1;
    Ok(Costs {
        stream_bytes,
        stream_gb_s: stream_bytes as f64 / (read - round_trip).max(1e-9) / 1e9,
        dispatch_us: (dispatches - round_trip).max(0.0) * 1e6 / f64::from(DISPATCHES),
        encode_us: encode * 1e6 / f64::from(DISPATCHES),
        empty_workgroup_ns: (empty - round_trip).max(0.0) * 1e9 / f64::from(EMPTY_GROUPS),
        round_trip_us: round_trip * 1e6,
    })
}

/// Seconds of encoding, and seconds from the submission until it is done.
fn time(device: &Device, probe: &Probe, dispatches: u32, groups: u32) -> Result<(f64, f64)> {
    let start = Instant::now();
    let commands = probe.encode(dispatches, groups).finish();
    let encode = start.elapsed().as_secs_f64();
    let start = Instant::now();
    let submission = device.queue.submit([commands]);
    device.wait(submission)?;
    Ok((encode, start.elapsed().as_secs_f64()))
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_stream_kernel_has_as_many_workgroups_as_are_dispatched() {
        assert!(super::STREAM.contains(&format!("const GROUPS: u32 = {}u;", super::STREAM_GROUPS)));
    }
}
