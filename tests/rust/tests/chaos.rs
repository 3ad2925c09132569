//! A process that stores, loads and evicts is killed again and again, its files are damaged in
//! between, and it is never handed a wrong byte.
//!
//! `KVSTRATA_TEST_CHAOS_S` says for how many seconds (60), `KVSTRATA_TEST_CHAOS_SEED` repeats the
//! choices of an earlier run, though not the moments at which the kernel does what it is told.

#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::disallowed_methods,
    reason = "a test fails by panicking, and says what it did"
)]

mod chaos_support;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use chaos_support::ground::{Generations, flip_bits};
use chaos_support::{Plan, allocated, below, child, everything};
use kvstrata_core::sys::clock::{Clock, SystemClock};

const SECONDS: u64 = 60;
const ENGINES: [&str; 2] = ["threads", "uring"];
/// Root, engine, seed of the plan, seed of the choices, number of jobs.
const ARGUMENTS: &str = "KVSTRATA_TEST_CHAOS_CHILD";

/// Not a test of its own: the process that the other one kills.
#[test]
fn a_child_does_nothing_unless_it_is_told_to() {
    let Ok(arguments) = std::env::var(ARGUMENTS) else {
        return;
    };
    let mut arguments = arguments.split('|');
    let mut argument = || arguments.next().unwrap();
    let root = PathBuf::from(argument());
    let engine = argument().to_owned();
    let mut number = || argument().parse::<u64>().unwrap();
    let plan = Plan::new(number());
    let (chance, jobs) = (number(), number());
    child::run(&root, plan, &engine, chance, jobs);
}

fn start(root: &Path, plan: &Plan, engine: &str, chance: u64, jobs: u64) -> Child {
    let root = root.display();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_child_does_nothing_unless_it_is_told_to"])
        .arg("--nocapture")
        .env(
            ARGUMENTS,
            format!("{root}|{engine}|{}|{chance}|{jobs}", plan.seed),
        )
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until the child has opened its tier; returns what it said.
fn wait_open(child: &mut Child) -> Vec<u64> {
    let mut lines = BufReader::new(child.stdout.as_mut().unwrap()).lines();
    let mut heard = Vec::new();
    while let Some(Ok(line)) = lines.next() {
        if let Some((_, figures)) = line.split_once("open ") {
            return figures.split(' ').map(|n| n.parse().unwrap()).collect();
        }
        heard.push(line);
    }
    let status = child.wait().unwrap();
    panic!(
        "the child ended before it was open: {status}; {}",
        heard.join("\n")
    );
}

fn end(mut child: Child) -> (ExitStatus, String) {
    let mut rest = String::new();
    let status = child.wait().unwrap();
    std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut rest).unwrap();
    (status, rest)
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

#[test]
fn a_process_killed_at_any_moment_leaves_whole_rows_or_none_and_its_space_exact() {
    let seconds = setting("KVSTRATA_TEST_CHAOS_S").unwrap_or(SECONDS);
    let seed = setting("KVSTRATA_TEST_CHAOS_SEED").unwrap_or_else(|| {
        let mut bytes = [0; 8];
        kvstrata_core::sys::fs::fill_random(&mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    });
    let plan = Plan::new(seed);
    println!("KVSTRATA_TEST_CHAOS_SEED={seed}: {plan:?}");
    let holder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let root = holder.path().join("kv");
    let mut chance = seed;
    let mut generations = Generations::default();
    let until = SystemClock.now() + Duration::from_secs(seconds);
    let (mut rounds, mut flips, mut rows, mut most) = (0_usize, 0, 0, 0);
    let (mut clean, mut early) = (0, 0);
    while SystemClock.now() < until {
        let engine = ENGINES[rounds % 2];
        rounds += 1;
        let manner = below(&mut chance, 16);
        let jobs = if manner == 0 { 40 } else { 0 };
        let mut child = start(&root, &plan, engine, below(&mut chance, u64::MAX), jobs);
        if manner < 4 && jobs == 0 {
            // While it opens, most of the time.
            SystemClock.sleep(Duration::from_millis(below(&mut chance, 80)));
            early += 1;
        } else {
            rows += wait_open(&mut child)[0];
            SystemClock.sleep(Duration::from_millis(below(&mut chance, 400)));
        }
        if jobs == 0 {
            child.kill().unwrap();
        }
        let (status, said) = end(child);
        let killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(libc::SIGKILL);
        assert!(
            killed || (jobs > 0 && status.success()),
            "seed {seed}: {status}: {said}"
        );
        clean += u64::from(!killed);
        let taken = allocated(&root);
        most = most.max(taken);
        assert!(
            taken <= plan.capacity,
            "seed {seed}: {taken} bytes of {}",
            plan.capacity
        );
        if let Err(why) = generations.look(&root) {
            panic!("seed {seed}: {why}");
        }
        if below(&mut chance, 2) == 0 {
            flips += flip_bits(&root, &mut chance);
        }
    }
    let mut child = start(&root, &plan, ENGINES[0], seed, 2);
    wait_open(&mut child);
    let (status, said) = end(child);
    assert!(status.success(), "seed {seed}: {status}: {said}");
    let left: Vec<_> = everything(&root)
        .into_iter()
        .filter(|path| path.extension() == Some("tmp".as_ref()) || path.ends_with("lock"))
        .collect();
    assert_eq!(left, Vec::<PathBuf>::new(), "seed {seed}");
    println!(
        "{rounds} lives ({clean} to a clean end, {early} killed at their start), {rows} rows found at their starts, {} entries \
         looked at, {flips} bits flipped, at most {most} of {} bytes taken",
        generations.seen, plan.capacity
    );
    assert!(rounds > 2 && rows > 0 && generations.seen > 0);
}
