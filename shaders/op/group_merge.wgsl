// Mean of every group of channels of an image, and 1 / sqrt(variance + eps), stored for each of its channels.
// partials [rows of the image, 2, channels padded to 4]: means and sums of squares around them of `width` pixels, as
// channel_stats.wgsl stores them; stats [2, channels padded to 4]: means, then factors.
// A workgroup computes one group. Two sets of equally many values are joined without a difference of large sums
// (Chan et al. 1979): the squares around the common mean are those around each mean plus those of the two means.

#import frame

var<workgroup> counts: array<f32, THREADS>;
var<workgroup> means: array<f32, THREADS>;
var<workgroup> squares: array<f32, THREADS>;

// A set of values: their number, mean, and sum of squares around the mean.
struct Moments { count: f32, mean: f32, squares: f32 }

fn joined(a: Moments, b: Moments) -> Moments {
    let count = max(a.count + b.count, 1.0);
    let change = b.mean - a.mean;
    let share = b.count / count;
    return Moments(
        a.count + b.count,
        fma(change, share, a.mean),
        a.squares + fma(change * change, a.count * share, b.squares),
    );
}

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let members = params.channels / params.groups;
    let stored = (params.channels + 3u) & ~3u;
    let first = workgroup.x * members;
    var own = Moments(0.0, 0.0, 0.0);
    for (var i = thread; i < image_height() * members; i += THREADS) {
        let at = i / members * 2u * stored + first + i % members;
        own = joined(own, Moments(f32(params.width), partials[at], partials[at + stored]));
    }
    counts[thread] = own.count;
    means[thread] = own.mean;
    squares[thread] = own.squares;
    workgroupBarrier();
    var all = Moments(0.0, 0.0, 0.0);
    for (var t = 0u; t < THREADS; t += 1u) {
        all = joined(all, Moments(counts[t], means[t], squares[t]));
    }
    for (var i = thread; i < members; i += THREADS) {
        stats[first + i] = all.mean;
        stats[stored + first + i] = 1.0 / sqrt(all.squares / max(all.count, 1.0) + params.eps);
    }
}
