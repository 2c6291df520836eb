//! Detached signatures (section 8 of the format): `<file>.sig` beside each file of a model, JSON of
//! `{alg, pubkey, sha256, sig}`, an Ed25519 signature over the 32 bytes of the file's SHA-256.
//!
//! A signature file is as untrusted as the file that it belongs to.

use super::Progress;
use crate::error::{Error, Kind, Result, bail};
use crate::format::cmf::CmfContainer;
use crate::format::{from_hex, hex, json, not_the_output, read_start, temporary_beside};
use ed25519_dalek::{Signature, Signer, SigningKey, VerifyingKey};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The only supported algorithm.
const ALGORITHM: &str = "ed25519-sha256";
/// The longest signature file that is read; a valid one has about 330 bytes.
const MAX_SIGNATURE: u64 = 16 << 10;
/// The longest key file that is read.
const MAX_KEY: u64 = 1 << 10;
/// The block size for reading files.
const BLOCK: usize = 1 << 20;

/// The Ed25519 public key of a signer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PublicKey([u8; 32]);

impl PublicKey {
    /// Parses a key of 64 hex digits. Errors: `Usage` for anything else.
    pub fn from_hex(text: &str) -> Result<PublicKey> {
        let bytes =
            from_hex(text).ok_or_else(|| Error::new(Kind::Usage, "invalid public key, expected 64 hex digits"))?;
        Ok(PublicKey(bytes))
    }

    /// The key as 64 hex digits.
    pub fn to_hex(self) -> String {
        hex(&self.0)
    }
}

/// A signed file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signed {
    /// The file.
    pub file: PathBuf,
    /// Its signature file.
    pub signature: PathBuf,
    /// The signer.
    pub key: PublicKey,
    /// SHA-256 of the file.
    pub sha256: [u8; 32],
}

/// The result of checking a model's signatures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// No file has a signature, and no signer was required.
    Unsigned,
    /// Every file has a signature of this key.
    Valid {
        /// The signer.
        key: PublicKey,
        /// Whether the signer was required to be this key. Without that, the signature says nothing about the file's author.
        pinned: bool,
    },
}

/// The path of a file's signature.
pub fn path_beside(file: &Path) -> PathBuf {
    let mut path = file.to_owned().into_os_string();
    path.push(".sig");
    path.into()
}

/// Signs every file of the model at `model` with the seed in `key_file`.
///
/// Errors: `Parse` for a key file that is not 32 bytes in hex; `Usage` if a signature would replace the key file; those of
/// [`CmfContainer::open`]; `Io`.
pub fn sign(model: &Path, key_file: &Path, progress: Progress) -> Result<Vec<Signed>> {
    let key = signing_key(key_file)?;
    let paths = CmfContainer::open(model)?.shard_paths().to_vec();
    paths
        .iter()
        .try_for_each(|file| not_the_output(key_file, &path_beside(file)))?;
    let digests = digests(&paths, progress)?;
    let mut signed = Vec::with_capacity(paths.len());
    for (file, sha256) in paths.into_iter().zip(digests) {
        let key_bytes = key.verifying_key().to_bytes();
        let text = json!({
            "alg": ALGORITHM,
            "pubkey": hex(&key_bytes),
            "sha256": hex(&sha256),
            "sig": hex(&key.sign(&sha256).to_bytes()),
        });
        let signature = path_beside(&file);
        write_whole(&signature, format!("{text}\n").as_bytes())?;
        signed.push(Signed {
            file,
            signature,
            key: PublicKey(key_bytes),
            sha256,
        });
    }
    Ok(signed)
}

/// Checks the signatures of `paths`, the files of a model.
///
/// Errors: `SignatureInvalid` for a malformed or wrong signature, for another key than `pinned`, for files without or with
/// different signers if another file of the model is signed, and for a missing signature if a key is `pinned`; `Io` for a
/// model file that cannot be read.
pub fn check(paths: &[PathBuf], pinned: Option<PublicKey>, progress: Progress) -> Result<Verdict> {
    let mut claims = Vec::new();
    for file in paths {
        let signature = path_beside(file);
        // Only `NotFound` means absent: a signature that cannot be read must not count as none.
        if std::fs::symlink_metadata(&signature).is_err_and(|err| err.kind() == std::io::ErrorKind::NotFound) {
            continue;
        }
        let claim = Claim::read(&signature).map_err(|err| Error::new(Kind::SignatureInvalid, err.message))?;
        claims.push((file, claim));
    }
    let Some((_, first)) = claims.first() else {
        return match pinned {
            None => Ok(Verdict::Unsigned),
            Some(_) => bail!(
                SignatureInvalid,
                "the model is not signed, expected a signature of the given key"
            ),
        };
    };
    let key = first.key;
    if let Some(file) = paths.iter().find(|path| claims.iter().all(|(file, _)| file != path)) {
        let file = file.display();
        bail!(SignatureInvalid, "{file}: not signed, unlike other files of the model");
    }
    if let Some((file, claim)) = claims.iter().find(|(_, claim)| claim.key != key) {
        let (file, one, others) = (file.display(), claim.key.to_hex(), key.to_hex());
        bail!(
            SignatureInvalid,
            "{file}: signed by {one}, other files of the model by {others}"
        );
    }
    let found = digests(paths, progress)?;
    for ((file, claim), found) in claims.iter().zip(found) {
        let checked = claim.check(&found);
        checked.map_err(|err| err.context(path_beside(file).display()))?;
    }
    if let Some(pinned) = pinned.filter(|pinned| *pinned != key) {
        let (key, pinned) = (key.to_hex(), pinned.to_hex());
        bail!(SignatureInvalid, "signed by {key}, expected {pinned}");
    }
    Ok(Verdict::Valid {
        key,
        pinned: pinned.is_some(),
    })
}

/// The contents of a signature file.
struct Claim {
    key: PublicKey,
    sha256: [u8; 32],
    signature: [u8; 64],
}

impl Claim {
    /// Errors: `SignatureInvalid`, `Parse`, `Bounds`, `Io`; they name the file.
    fn read(path: &Path) -> Result<Claim> {
        let text = read_bounded(path, MAX_SIGNATURE)?;
        Claim::parse(&text).map_err(|err| err.context(path.display()))
    }

    fn parse(text: &[u8]) -> Result<Claim> {
        let members = json::parse_object(text, "signature")?;
        let text = |name: &str| match members.get(name) {
            Some(Value::String(text)) => Ok(text.as_str()),
            Some(other) => {
                let found = json::kind_of(other);
                bail!(SignatureInvalid, "{name}: expected a string, found {found}")
            }
            None => bail!(SignatureInvalid, "{name} is missing"),
        };
        let algorithm = text("alg")?;
        if algorithm != ALGORITHM {
            bail!(SignatureInvalid, "alg is '{algorithm}', expected '{ALGORITHM}'");
        }
        fn member<const N: usize>(name: &str, text: &str) -> Result<[u8; N]> {
            from_hex(text).ok_or_else(|| {
                let message = format!("{name}: expected {} hex digits, found {} bytes", 2 * N, text.len());
                Error::new(Kind::SignatureInvalid, message)
            })
        }
        Ok(Claim {
            key: PublicKey(member("pubkey", text("pubkey")?)?),
            sha256: member("sha256", text("sha256")?)?,
            signature: member("sig", text("sig")?)?,
        })
    }

    /// Checks the claim against the digest of the file. Errors: `SignatureInvalid`.
    fn check(&self, found: &[u8; 32]) -> Result<()> {
        if self.sha256 != *found {
            bail!(
                SignatureInvalid,
                "the signature is for a file with SHA-256 {}, this file has {}",
                hex(&self.sha256),
                hex(found)
            );
        }
        // The strict check refuses keys of small order and non-canonical signatures.
        VerifyingKey::from_bytes(&self.key.0)
            .and_then(|key| key.verify_strict(found, &Signature::from_bytes(&self.signature)))
            .map_err(|_| {
                let message = format!("the signature does not match the key {}", self.key.to_hex());
                Error::new(Kind::SignatureInvalid, message)
            })
    }
}

fn signing_key(path: &Path) -> Result<SigningKey> {
    let text = read_bounded(path, MAX_KEY)?;
    let seed = std::str::from_utf8(&text)
        .ok()
        .and_then(|text| from_hex(text.trim()))
        // The text omits the file's content, which may be a mistyped secret.
        .ok_or_else(|| {
            let message = format!("{}: expected a key, 32 bytes as 64 hex digits", path.display());
            Error::new(Kind::Parse, message)
        })?;
    Ok(SigningKey::from_bytes(&seed))
}

/// SHA-256 of each file.
fn digests(paths: &[PathBuf], progress: Progress) -> Result<Vec<[u8; 32]>> {
    let mut total = 0;
    for path in paths {
        total += std::fs::metadata(path).map_err(|err| Error::io(path, &err))?.len();
    }
    let mut done = 0;
    let mut block = vec![0; BLOCK];
    let mut digests = Vec::with_capacity(paths.len());
    for path in paths {
        let io = |err: std::io::Error| Error::io(path, &err);
        let mut file = File::open(path).map_err(io)?;
        let mut hash = Sha256::new();
        loop {
            let read = match file.read(&mut block) {
                Err(err) if err.kind() == std::io::ErrorKind::Interrupted => continue,
                read => read.map_err(io)?,
            };
            if read == 0 {
                break;
            }
            hash.update(&block[..read]);
            done += read as u64;
            if progress(done, total).is_break() {
                bail!(Interrupted, "cancelled");
            }
        }
        digests.push(hash.finalize().into());
    }
    Ok(digests)
}

/// Reads a small regular file. Errors: `Io`; `Bounds` if it has more than `most` bytes.
fn read_bounded(path: &Path, most: u64) -> Result<Vec<u8>> {
    let text = read_start(path, most + 1)?;
    if text.len() as u64 > most {
        bail!(Bounds, "{}: has more than {most} bytes", path.display());
    }
    Ok(text)
}

fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = temporary_beside(path)?;
    let written = file.write_all(bytes).and_then(|()| file.as_file().sync_all());
    written.map_err(|err| Error::io(path, &err))?;
    file.persist(path).map(drop).map_err(|err| Error::io(path, &err.error))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A signature by another implementation.
    const FOREIGN: &str = r#"{"alg": "ed25519-sha256",
        "pubkey": "d1890ecc5facb40434b4cd6f683a28c66cb176f5b85c17fec42715cd45ffacef",
        "sha256": "c6b976d67eb70c9731ccb7031a00325e2c10d4987b0fb91c3b1675de207050fa",
        "sig": "807d05a8624fddb51178f0833139a1c95f67a4031e574fc1f4edf8a9ea7b2595f8cbd6d86130a8bd145205c0f4239ccc212fe7a9e8926faeac7b01d943352b0b"}"#;

    fn claim(text: &str) -> Result<Claim> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("it.sig");
        std::fs::write(&path, text).unwrap();
        Claim::read(&path)
    }

    #[test]
    fn a_signature_of_another_implementation() {
        let good = claim(FOREIGN).unwrap();
        let digest = good.sha256;
        good.check(&digest).unwrap();
        assert!(good.check(&[7; 32]).unwrap_err().message.contains("is for a file"));
        let last_bit = FOREIGN.replace("2b0b\"", "2b0a\"");
        let err = claim(&last_bit).unwrap().check(&digest).unwrap_err();
        assert_eq!(err.kind, Kind::SignatureInvalid);
        assert!(err.message.contains("the signature does not match the key"), "{err}");
        // The same signature with another key, with a key that is not on the curve, and with one of small order.
        for key in [
            "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
            &"ff".repeat(32),
            &"00".repeat(32),
        ] {
            let other = FOREIGN.replace("d1890ecc5facb40434b4cd6f683a28c66cb176f5b85c17fec42715cd45ffacef", key);
            assert!(claim(&other).unwrap().check(&digest).is_err(), "{key}");
        }
    }

    #[test]
    fn malformed_signature_files_are_refused() {
        let with = |from: &str, to: &str| FOREIGN.replace(from, to);
        let cases = [
            (String::new(), "EOF"),
            ("[]".into(), "expected an object"),
            ("[".repeat(10_000), "recursion"),
            (" ".repeat(20_000), "more than"),
            (with("ed25519-sha256", "rsa"), "alg is 'rsa'"),
            (with("\"ed25519-sha256\"", "7"), "alg: expected a string"),
            (with("\"alg\"", "\"algorithm\""), "alg is missing"),
            (with("d1890e", "d1890"), "pubkey: expected 64 hex digits"),
            (with("d1890e", "d1890eff"), "pubkey: expected 64 hex digits"),
            (with("d1890e", "g1890e"), "pubkey: expected 64 hex digits"),
            (with("d1890e", "+1890e"), "pubkey: expected 64 hex digits"),
            (with("c6b976", "éb976"), "sha256: expected 64 hex digits"),
            (with("807d05", ""), "sig: expected 128 hex digits"),
            (with("{\"alg\"", "{\"sig\": \"00\", \"alg\""), "appears twice"),
        ];
        for (text, says) in cases {
            let err = claim(&text).map(|_| ()).unwrap_err();
            assert!(err.message.contains(says), "{says}: {err}");
        }
    }

    #[test]
    fn a_key_of_the_standard_is_derived_from_its_seed() {
        // RFC 8032, section 7.1, test 1.
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        let seed = "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60\n";
        std::fs::write(&path, seed).unwrap();
        let key = signing_key(&path).unwrap().verifying_key().to_bytes();
        let wanted = "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a";
        assert_eq!(hex(&key), wanted);
        for text in ["", "9d61", &"zz".repeat(32), &"00".repeat(33), &"0".repeat(5000)] {
            std::fs::write(&path, text).unwrap();
            let err = signing_key(&path).unwrap_err();
            assert!(!err.message.contains("9d61"), "the seed is not shown: {err}");
        }
    }
}
