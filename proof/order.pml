/* The latch of mailbox/loadbox.h on weakly ordered memory: is every release, acquire and fence needed, and are they enough?
 *
 * Writer.  Its stores reach memory in any order that its fences allow, one at a time.  Store i may go when all stores that must
 * precede it have gone:
 *     a store-release waits for every earlier store;
 *     a store after a release fence waits for every store before that fence;
 *     stores to one word keep their order.
 * Nothing else holds a store back; above all, later stores may overtake a store-release.  The six stores of publish n are
 * numbered 6n..6n+5: seq = 2n-1, A0 = n, A1 = n, seq = 2n, B0 = n, B1 = n.  Publish 0 is the zeros of a fresh segment.
 *
 * Reader.  The two words are loaded in either order.  Without the acquire, words may be loaded before the first look at the
 * sequence, from a guessed copy; without the fence, the second look may be done before the words.
 *
 * Repair.  A writer's death and the next one's lock go through the kernel, so what the dead one stored has reached memory before
 * the repair begins.  In half of the runs (`lost`) publish 1 was cut off after seq = 1 and A0: the repair is then stores 7 to 9,
 * with the values of publish 0.  The repair of an even sequence, B := A, is stores 10 and 11 of any run.
 *
 * Claim: a record accepted under sequence s is whole and is publish s/2, or what the repair put in its place.
 *
 * Variants that must fail, one for each ordering in the header that processors can break: FIRST_RELAXED, SECOND_RELAXED (the
 * stores of seq in a publish), REPAIR_RELAXED (the one in the repair), NO_FIRST_FENCE, NO_SECOND_FENCE (the writer's),
 * NO_ACQUIRE, NO_READ_FENCE (the reader's).  The fence in the repair is not among them: it is there for the rules of C11, and a
 * processor that keeps the acquire before it keeps the order. */

byte seq, a[2], b[2];
int gone = 63; /* bit i: store i has reached memory */
bool lost;

#define VALUE(n) ((n) == 1 && lost -> 0 : (n))

#define BELOW(i) ((1 << (i)) - 1)
#define BEFORE_LAST_FENCE(n) BELOW(6 * (n) - 2) /* the fence between the second store of seq and B, one publish earlier */

#ifdef FIRST_RELAXED
#define FIRST_WAITS(n) BEFORE_LAST_FENCE(n)
#else
#define FIRST_WAITS(n) BELOW(6 * (n))
#endif
#ifdef NO_FIRST_FENCE
#define A_WAITS(n) BEFORE_LAST_FENCE(n)
#else
#define A_WAITS(n) BELOW(6 * (n) + 1)
#endif
#ifdef SECOND_RELAXED
#define SECOND_WAITS(n) BELOW(6 * (n) + 1)
#elif defined(REPAIR_RELAXED)
#define SECOND_WAITS(n) ((n) == 1 && lost -> BELOW(6 * (n) + 1) : BELOW(6 * (n) + 3))
#else
#define SECOND_WAITS(n) BELOW(6 * (n) + 3)
#endif
#ifdef NO_SECOND_FENCE
#define B_WAITS(n) BELOW(6 * (n) + 1)
#else
#define B_WAITS(n) BELOW(6 * (n) + 4)
#endif

#define STORE(i, waits, word, value) \
    :: d_step { (gone & (1 << (i))) == 0 && (gone & (waits)) == (waits) -> word = value; gone = gone | (1 << (i)) }
#define PUBLISH(n) \
    STORE(6 * (n), FIRST_WAITS(n), seq, 2 * (n) - 1) \
    STORE(6 * (n) + 1, A_WAITS(n), a[0], VALUE(n)) \
    STORE(6 * (n) + 2, A_WAITS(n), a[1], VALUE(n)) \
    STORE(6 * (n) + 3, SECOND_WAITS(n), seq, 2 * (n)) \
    STORE(6 * (n) + 4, B_WAITS(n), b[0], VALUE(n)) \
    STORE(6 * (n) + 5, B_WAITS(n), b[1], VALUE(n))

proctype writer()
{
end:
    do
    PUBLISH(1)
    PUBLISH(2)
    PUBLISH(3)
    od
}

/* Load word i of the copy `odd` points at, if it has not been loaded yet. */
inline load(i)
{
    d_step {
        !(have & (1 << i)) ->
        if
        :: odd -> x[i] = b[i]
        :: else -> x[i] = a[i]
        fi;
        have = have | (1 << i)
    }
}

proctype reader()
{
    byte s, t, x[2], have;
    bool odd, looked, whole;

end:
    do
    :: true ->
#ifdef NO_ACQUIRE
       if
       :: odd = false
       :: odd = true
       fi;
       do
       :: load(0)
       :: load(1)
       :: break
       od;
#endif
       s = seq;
#ifdef NO_ACQUIRE
       if
       :: have && odd != (s % 2) -> have = 0 /* guessed wrong: load again */
       :: else -> skip
       fi;
#endif
       odd = s % 2;
#ifdef NO_READ_FENCE
       if
       :: t = seq; looked = true
       :: skip
       fi;
#endif
       do
       :: load(0)
       :: load(1)
       :: have == 3 -> break
       od;
       if
       :: looked -> skip
       :: else -> t = seq
       fi;
       d_step {
           whole = t != s /* not accepted */ || (x[0] == VALUE(s / 2) && x[1] == VALUE(s / 2));
           assert(whole);
           whole = false; s = 0; t = 0; x[0] = 0; x[1] = 0; have = 0; odd = false; looked = false
       }
    od
}

init
{
    atomic {
        if
        :: true -> skip
        :: lost = true; seq = 1; a[0] = 1; gone = gone | 64 | 1024 | 2048
        fi;
        run writer();
        run reader()
    }
}
