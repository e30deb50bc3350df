//! Looking functions up by name.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use super::btf::{Btf, Return, Signature};
use super::symbols;
use super::{BTF_DIR, Target, host};
use crate::error::{Error, ErrorKind, NotTraceable};

const VMLINUX: &str = "vmlinux";
/// Words that a context can hold: MAX_BPF_FUNC_ARGS in the kernel's `include/linux/bpf.h`.
const MOST_WORDS: u32 = 12;
/// How many near names an error offers.
const NEAR_NAMES: usize = 3;
/// From this similarity on (0 to 1) a name counts as near.
const NEAR: f64 = 0.85;

/// The functions of this kernel and its loaded modules. Modules are read once one is asked for.
pub(crate) struct Functions {
    vmlinux: Btf<'static>,
}

/// A name as the user wrote it: `FUNCTION` or `MODULE:FUNCTION`.
struct Wanted<'a> {
    module: Option<&'a str>,
    function: &'a str,
}

impl<'a> Wanted<'a> {
    fn parse(name: &'a str) -> Self {
        match name.split_once(':') {
            Some((module, function)) => Self { module: Some(module), function },
            None => Self { module: None, function: name },
        }
    }

    fn may_be_in(&self, module: &str) -> bool {
        self.module.is_none_or(|wanted| wanted == module)
    }
}

/// Where a function was found.
struct Found {
    module: Option<String>,
    signatures: Vec<Signature>,
}

impl Functions {
    /// Reads vmlinux's type information.
    pub(crate) fn open() -> Result<Self, Error> {
        let path = format!("{BTF_DIR}/{VMLINUX}");
        let data = fs::read(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Error::from(ErrorKind::NoBtf { path: path.clone() }),
            _ => Error::system(format!("reading {path}"), error.raw_os_error().unwrap_or(0)),
        })?;
        let vmlinux = Btf::parse(data, None).map_err(|error| unreadable(&path, &error))?;
        Ok(Self { vmlinux })
    }

    /// Finds each of `names`, and fails on the first that can't be traced.
    ///
    /// The names are looked up together, since one pass over the types takes as long for one name as for fifty.
    pub(crate) fn resolve(&self, names: &[&str]) -> Result<Vec<Target>, Error> {
        let wanted: Vec<_> = names.iter().map(|name| Wanted::parse(name)).collect();
        for (name, wanted) in names.iter().zip(&wanted) {
            if let Some(reason) = symbols::refused_by_name(wanted.function) {
                return Err(Error::not_traceable(name, reason));
            }
        }

        let mut found: BTreeMap<usize, Vec<Found>> = BTreeMap::new();
        let every: Vec<_> = wanted.iter().enumerate().collect();
        search(&self.vmlinux, None, &every, &mut found);
        let missing: Vec<_> = every.into_iter().filter(|(n, _)| !found.contains_key(n)).collect();
        if !missing.is_empty() {
            for (module, data) in module_btfs() {
                let Ok(btf) = Btf::parse(data, Some(&self.vmlinux)) else { continue };
                search(&btf, Some(&module), &missing, &mut found);
            }
        }
        names
            .iter()
            .enumerate()
            .map(|(n, name)| match found.remove(&n) {
                Some(places) => target(name, &wanted[n], places).and_then(|target| only_copy(name, target)),
                None => Err(self.not_found(name, &wanted[n])),
            })
            .collect()
    }

    /// Why a name isn't in any BTF.
    fn not_found(&self, name: &str, wanted: &Wanted<'_>) -> Error {
        if let Some(reason) = symbols::why_not_in_btf(wanted.module, wanted.function) {
            return Error::not_traceable(name, reason);
        }
        let mut near: Vec<(f64, String)> = Vec::new();
        let mut consider = |candidate: &str| {
            let similarity = strsim::jaro_winkler(wanted.function, candidate);
            if similarity >= NEAR && !near.iter().any(|(_, known)| known == candidate) {
                near.push((similarity, candidate.to_owned()));
            }
        };
        self.vmlinux.functions().for_each(|(_, candidate)| consider(candidate));
        for (_, data) in module_btfs() {
            if let Ok(btf) = Btf::parse(data, Some(&self.vmlinux)) {
                btf.functions().for_each(|(_, candidate)| consider(candidate));
            }
        }
        near.sort_by(|a, b| b.0.total_cmp(&a.0).then_with(|| Reverse(&b.1).cmp(&Reverse(&a.1))));
        let near = near.into_iter().take(NEAR_NAMES).map(|(_, name)| name).collect();
        ErrorKind::UnknownFunction { function: name.to_owned(), near }.into()
    }
}

/// The BTFs of the loaded modules. One that can't be read (its module is just going) is left out.
fn module_btfs() -> impl Iterator<Item = (String, Vec<u8>)> {
    let entries = fs::read_dir(Path::new(BTF_DIR)).into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        if name == VMLINUX {
            return None;
        }
        Some((name, fs::read(entry.path()).ok()?))
    })
}

/// Notes which of the wanted functions `btf` describes.
fn search(
    btf: &Btf<'_>,
    module: Option<&str>,
    wanted: &[(usize, &Wanted<'_>)],
    found: &mut BTreeMap<usize, Vec<Found>>,
) {
    let mut here: BTreeMap<usize, Vec<Signature>> = BTreeMap::new();
    for (id, name) in btf.functions() {
        for &(n, wanted) in wanted {
            if name == wanted.function && wanted.may_be_in(module.unwrap_or(VMLINUX)) {
                here.entry(n).or_default().extend(btf.signature(id));
            }
        }
    }
    for (n, signatures) in here {
        found.entry(n).or_default().push(Found { module: module.map(str::to_owned), signatures });
    }
}

/// The one place a function was found in, if it can be traced as far as its signature tells.
fn target(name: &str, wanted: &Wanted<'_>, places: Vec<Found>) -> Result<Target, Error> {
    let reject = |reason| Err(Error::not_traceable(name, reason));
    let mut functions: Vec<(Option<String>, Signature)> = Vec::new();
    for Found { module, signatures } in places {
        functions.extend(signatures.into_iter().map(|signature| (module.clone(), signature)));
    }
    let modules = || {
        let names = functions.iter().map(|(module, _)| module.clone().unwrap_or_else(|| VMLINUX.to_owned()));
        names.collect()
    };
    let [(module, signature)] = functions.as_slice() else {
        let one_place = functions.windows(2).all(|pair| pair[0].0 == pair[1].0);
        let copies = functions.len();
        return reject(if one_place {
            NotTraceable::Indistinct { copies }
        } else {
            NotTraceable::Ambiguous { modules: modules() }
        });
    };

    if signature.variadic {
        return reject(NotTraceable::Variadic);
    }
    if signature.ret == Return::Other {
        return reject(NotTraceable::ReturnsAggregate);
    }
    let arg_words = signature.params.iter().map(|param| param.words).sum();
    if arg_words > MOST_WORDS {
        return reject(NotTraceable::TooManyArguments { words: arg_words });
    }
    let before_skb = signature.params.iter().position(|param| param.points_to.as_deref() == Some("sk_buff"));
    Ok(Target {
        function: wanted.function.to_owned(),
        module: module.clone(),
        arg_words,
        skb_word: before_skb.map(|n| signature.params[..n].iter().map(|param| param.words).sum()),
        ret: signature.ret,
    })
}

/// Refuses a function that the kernel would confuse with another of the same name.
///
/// It finds a function's code by its name. For a module's function it has looked in that module only since Linux 6.4;
/// nothing but its version tells.
fn only_copy(name: &str, target: Target) -> Result<Target, Error> {
    let copies = match &target.module {
        None => symbols::copies_in_kernel(&target.function),
        Some(module) => {
            let (here, anywhere) = symbols::copies_of_module_function(module, &target.function);
            let looks_in_module = host::kernel_version().is_none_or(|version| version >= (6, 4));
            if looks_in_module { here } else { anywhere }
        }
    };
    if copies > 1 {
        return Err(Error::not_traceable(name, NotTraceable::Indistinct { copies }));
    }
    Ok(target)
}

fn unreadable(path: &str, error: &super::btf::BtfError) -> Error {
    // EBADMSG, as close as errno comes to "not the format that was promised".
    Error::system(format!("reading {path}: {error}"), 74)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::btf::Param;

    fn signature(words: &[u32], ret: Return) -> Signature {
        let params = words.iter().map(|&words| Param { words, points_to: None }).collect();
        Signature { params, ret, variadic: false }
    }

    fn found(module: Option<&str>, signature: Signature) -> Found {
        Found { module: module.map(str::to_owned), signatures: vec![signature] }
    }

    fn reason(places: Vec<Found>) -> NotTraceable {
        match target("f", &Wanted::parse("f"), places).unwrap_err().kind() {
            ErrorKind::NotTraceable { reason, .. } => reason.clone(),
            other => panic!("{other:?}"),
        }
    }

    /// A struct of 16 bytes takes two words, and moves what follows it.
    #[test]
    fn counts_words() {
        let mut signature = signature(&[2, 1, 1], Return::Void);
        signature.params[1].points_to = Some("sk_buff".into());
        let target = target("m:f", &Wanted::parse("m:f"), vec![found(Some("m"), signature)]).unwrap();
        assert_eq!(target.function, "f");
        assert_eq!(target.module.as_deref(), Some("m"));
        assert_eq!(target.arg_words, 4);
        assert_eq!(target.skb_word, Some(2));
    }

    /// What a signature alone rules out.
    #[test]
    fn rejects_signatures() {
        let plain = || signature(&[1], Return::Void);
        let variadic = Signature { variadic: true, ..plain() };
        assert_eq!(reason(vec![found(None, variadic)]), NotTraceable::Variadic);
        assert_eq!(reason(vec![found(None, signature(&[], Return::Other))]), NotTraceable::ReturnsAggregate);
        let wide = signature(&[1; 13], Return::Void);
        assert_eq!(reason(vec![found(None, wide)]), NotTraceable::TooManyArguments { words: 13 });
        let copies = vec![found(None, plain()), found(None, plain())];
        assert_eq!(reason(copies), NotTraceable::Indistinct { copies: 2 });
        let twice = vec![found(None, plain()), found(Some("nf_nat"), plain())];
        let modules = vec!["vmlinux".to_owned(), "nf_nat".to_owned()];
        assert_eq!(reason(twice), NotTraceable::Ambiguous { modules });
    }

    /// On the kernel that runs the test: a function is found, a wrong one is named with what it resembles.
    #[test]
    fn resolves_on_this_kernel() {
        let Ok(functions) = Functions::open() else {
            eprintln!("this kernel has no BTF: nothing to look up");
            return;
        };
        let targets = functions.resolve(&["ip_rcv", "vmlinux:udp_sendmsg"]).unwrap();
        assert_eq!((targets[0].arg_words, targets[0].skb_word), (4, Some(0)));
        assert_eq!(targets[0].ret, Return::Number { bytes: 4, signed: true });
        assert_eq!((targets[1].function.as_str(), targets[1].skb_word), ("udp_sendmsg", None));

        let error = functions.resolve(&["ip_rcv", "ip_rvc"]).unwrap_err();
        match error.kind() {
            ErrorKind::UnknownFunction { function, near } => {
                assert_eq!(function, "ip_rvc");
                assert!(near.iter().any(|name| name == "ip_rcv"), "{near:?}");
            }
            other => panic!("{other:?}"),
        }
        let error = functions.resolve(&["no_such_module:ip_rcv"]).unwrap_err();
        assert!(matches!(error.kind(), ErrorKind::UnknownFunction { .. }), "{error}");
    }
}
