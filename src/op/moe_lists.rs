//! Groups the tokens of a prefill by expert.

use super::constants::EXPERT_TILE;
use super::define::*;
use super::experts::Table;

operator! {
    moe_lists
    params {
        tiles: u32,
    }
    bindings {
        read batch: Batch, experts: Experts, routes: array<u32>;
        write lists: array<u32>;
    }
    threads Some(256),
    grid |_| Grid::One,
    tolerance |_| Tolerance::Exact,
}

fn run(p: &Params, o: &mut Operands) -> Result<()> {
    let table = Table::read(o)?;
    let (tokens, top_k) = (o.count("batch")?, table.routing.top_k);
    let routes = o.words("routes", 0, tokens * (top_k + 1) * 2)?;
    let count = table.count;
    let mut entries = vec![Vec::new(); count];
    for entry in 0..tokens * top_k {
        let expert = routes[(entry / top_k * (top_k + 1) + entry % top_k) * 2];
        match entries.get_mut(expert as usize) {
            Some(list) => list.push(entry as u32),
            None => bail!(Internal, "'routes' names expert {expert}, expected less than {count}"),
        }
    }
    let (mut tiles, mut listed) = (Vec::new(), Vec::new());
    for (expert, list) in entries.iter().enumerate() {
        for tile in list.chunks(EXPERT_TILE as usize) {
            tiles.push([expert as u32, listed.len() as u32, tile.len() as u32]);
            listed.extend_from_slice(tile);
        }
    }
    let most = p.tiles as usize;
    if tiles.len() > most {
        bail!(Internal, "{} tiles, expected at most {most}", tiles.len());
    }
    for (tile, words) in tiles.iter().enumerate() {
        o.words_mut("lists", 3 * tile, 3)?.copy_from_slice(words);
    }
    for tile in tiles.len()..most {
        o.words_mut("lists", 3 * tile + 2, 1)?[0] = 0;
    }
    o.words_mut("lists", 3 * most, listed.len())?.copy_from_slice(&listed);
    Ok(())
}
